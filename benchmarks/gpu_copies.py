"""Copy-engine pushes and pulls beside matmuls: GB/s by lanes, and what the matmul loses. Two GPUs, one process."""
import sys, json, statistics, torch
from tilestream.runtime.driver import copy_across
B=torch.bfloat16; MB=1<<20
torch.cuda.set_device(0)
a=[torch.randn(8192,8192,device=f'cuda:{i}').to(B) for i in (0,1)]
out=[torch.empty(8192,8192,device=f'cuda:{i}',dtype=B) for i in (0,1)]
src=[torch.randn(64*MB//2,device=f'cuda:{i}').to(B) for i in (0,1)]
dst=[torch.empty_like(x) for x in src]
dst[1][:8].copy_(src[0][:8]); dst[0][:8].copy_(src[1][:8]); torch.cuda.synchronize(0); torch.cuda.synchronize(1)
lanes={i:[torch.cuda.Stream(i) for _ in range(4)] for i in (0,1)}
mm=[torch.cuda.Stream(i) for i in (0,1)]
def run(op,n,size,load,reps=7):
    """Both directions at once. load: GPUs that multiply. Returns ms of the copies (longer direction), ms of the matmul."""
    cs,ms=[],[]
    for _ in range(reps):
        for i in (0,1): torch.cuda.synchronize(i)
        ev={}
        for i in load:
            with torch.cuda.device(i), torch.cuda.stream(mm[i]):
                torch.cuda._sleep(600_000)
                ev['m',i]=[torch.cuda.Event(enable_timing=True) for _ in range(2)]
                ev['m',i][0].record(); torch.mm(a[i],a[i],out=out[i]); ev['m',i][1].record()
        for i in (0,1):  # the GPU whose engine works
            with torch.cuda.device(i):
                frm,to=(src[i],dst[1-i]) if op=='push' else (src[1-i],dst[i])
                first=lanes[i][0]
                with torch.cuda.stream(first):
                    torch.cuda._sleep(900_000); b=torch.cuda.Event(enable_timing=True); b.record()
                ends=[]
                for l in lanes[i][:n]:
                    l.wait_event(b)
                    with torch.cuda.stream(l):
                        part=size//n; k=lanes[i].index(l)
                        copy_across(l.cuda_stream,to.data_ptr()+k*part,frm.data_ptr()+k*part,part)
                        e=torch.cuda.Event(enable_timing=True); e.record(); ends.append(e)
                ev['c',i]=(b,ends)
        for i in (0,1): torch.cuda.synchronize(i)
        cs.append(max(max(ev['c',i][0].elapsed_time(e) for e in ev['c',i][1]) for i in (0,1)))
        if load: ms.append(max(ev['m',i][0].elapsed_time(ev['m',i][1]) for i in load))
    return statistics.median(cs), statistics.median(ms) if ms else 0
rows=[]
for size in (64*MB,16*MB,4*MB):
    for load in ((),(0,1),(0,)):
        for op in ('pull','push'):
            for n in (1,2,4):
                c,m=run(op,n,size,load)
                rows.append(dict(size=size//MB,load=load,op=op,lanes=n,gbps=round(size/c*1e-6,1),mm=round(m,4)))
                print(rows[-1],flush=True)
json.dump(rows,open(sys.argv[1],'w'),indent=1)
