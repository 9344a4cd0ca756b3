"""What the compiler made of a kernel, without a GPU: its machine code and the estimated cost of its main loop.

``amdgcn`` parses assembly, ``rates`` holds published rates of instructions, ``model`` combines the two; ``kernels`` is
the table of kernels that can be compiled, ``build`` compiles, ``report`` prints.
"""
