// Draws each `figure.timeline` from the JSON in it. A view is the range of microseconds that is shown.
"use strict";

const KIND = { tile: 0, part: 1, reduce: 2, wait: 3 };
const NAMES = ["tile", "part of tile", "adding up tile", "waiting at the gate of tile"];
const LEFT = 84, RIGHT = 12, AXIS = 40, MARKERS = 22, LEAST_ROW = 4, MOST_ROW = 34;

function duration(us) {
  const size = Math.abs(us);
  const [unit, value] = size < 999.5 ? ["us", us] : size < 999500 ? ["ms", us / 1e3] : ["s", us / 1e6];
  return `${Number(value.toPrecision(4))} ${unit}`;
}

function mixed(ramp, share) {
  const at = Math.min(Math.max(share, 0), 1) * (ramp.length - 1);
  const low = Math.min(Math.floor(at), ramp.length - 2), part = at - low;
  const channel = (i) => Math.round(ramp[low][i] * (1 - part) + ramp[low + 1][i] * part);
  return `rgb(${channel(0)},${channel(1)},${channel(2)})`;
}

class Timeline {
  constructor(figure) {
    this.data = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
    this.canvas = figure.querySelector("canvas");
    this.range = figure.querySelector(".range");
    this.chosenText = figure.querySelector(".chosen");
    this.operands = Object.keys(this.data.arrivals).filter((operand) => this.data.arrivals[operand].some((x) => x !== null));
    this.worker = 0;
    this.item = -1;
    const known = this.operands.flatMap((operand) => this.data.arrivals[operand].filter((x) => x !== null));
    const length = this.data.length || 1;
    // Arrivals long before the launch are drawn at the left edge.
    this.whole = [Math.max(-0.12 * length, Math.min(0, ...known, ...Object.values(this.data.started))), Math.max(length, ...known)];
    const margin = 0.004 * (this.whole[1] - this.whole[0]);
    this.whole = [this.whole[0] - margin, this.whole[1] + margin];
    this.view = [...this.whole];
    const workers = this.data.workers.length;
    this.row = Math.min(MOST_ROW, Math.max(LEAST_ROW, 460 / Math.max(workers, 1)));
    this.top = this.operands.length * MARKERS + (this.operands.length ? 8 : 0);
    this.height = this.top + workers * this.row + AXIS;
    this.canvas.style.height = `${this.height}px`;
    this.listen(figure);
    this.resize();
  }

  listen(figure) {
    const canvas = this.canvas;
    const act = {
      in: () => this.zoom(0.5), out: () => this.zoom(2), left: () => this.pan(-0.2), right: () => this.pan(0.2),
      all: () => this.show(...this.whole),
    };
    for (const button of figure.querySelectorAll("button[data-do]")) {
      button.addEventListener("click", act[button.dataset.do]);
    }
    const keys = {
      "+": act.in, "=": act.in, "-": act.out, _: act.out, ArrowLeft: act.left, ArrowRight: act.right, 0: act.all,
      Home: act.all, ArrowUp: () => this.choose(this.worker - 1, this.near(this.worker - 1)),
      ArrowDown: () => this.choose(this.worker + 1, this.near(this.worker + 1)),
      n: () => this.choose(this.worker, this.item + 1), p: () => this.choose(this.worker, this.item - 1),
    };
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
      event.preventDefault();
      keys[event.key]();
    });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the wheel alone scrolls the page
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.time(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.time(event.offsetX)));
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      held = { x: event.offsetX, view: [...this.view] };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (held) {
        const moved = ((held.x - event.offsetX) / this.inside) * (held.view[1] - held.view[0]);
        this.show(held.view[0] + moved, held.view[1] + moved);
      } else {
        this.point(event.offsetX, event.offsetY);
      }
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { held = null; });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.resize()).observe(canvas);
  }

  // The view ---------------------------------------------------------------------------------------------------------

  get inside() { return this.canvas.clientWidth - LEFT - RIGHT; }
  x(us) { return LEFT + ((us - this.view[0]) / (this.view[1] - this.view[0])) * this.inside; }
  time(x) { return this.view[0] + ((x - LEFT) / this.inside) * (this.view[1] - this.view[0]); }

  show(begin, end) {
    const whole = this.whole[1] - this.whole[0], length = Math.min(Math.max(end - begin, whole / 1e5), whole);
    const middle = (begin + end) / 2;
    const first = Math.min(Math.max(middle - length / 2, this.whole[0]), this.whole[1] - length);
    this.view = [first, first + length];
    this.draw();
  }

  zoom(factor, about) {
    const [begin, end] = this.view, chosen = this.span();
    let centre = about;
    if (centre === undefined) {
      const middle = chosen ? chosen[1] + chosen[2] / 2 : NaN;
      centre = middle > begin && middle < end ? middle : (begin + end) / 2;
    }
    this.show(centre - (centre - begin) * factor, centre + (end - centre) * factor);
  }

  pan(share) {
    const step = share * (this.view[1] - this.view[0]);
    this.show(this.view[0] + step, this.view[1] + step);
  }

  // What is chosen -----------------------------------------------------------------------------------------------------

  span() { return (this.data.workers[this.worker] || [])[this.item]; }

  near(worker) {
    const spans = this.data.workers[worker] || [], chosen = this.span();
    const when = chosen ? chosen[1] + chosen[2] / 2 : this.view[0];
    const after = spans.findIndex((span) => span[1] + span[2] >= when);
    return after < 0 ? spans.length - 1 : after;
  }

  choose(worker, item) {
    const last = this.data.workers.length - 1;
    this.worker = Math.min(Math.max(worker, 0), Math.max(last, 0));
    this.item = Math.min(Math.max(item, 0), (this.data.workers[this.worker] || []).length - 1);
    const span = this.span();
    if (span && (span[1] < this.view[0] || span[1] + span[2] > this.view[1])) {
      const half = (this.view[1] - this.view[0]) / 2, middle = span[1] + span[2] / 2;
      this.show(middle - half, middle + half);
    }
    this.tell();
    this.draw();
  }

  point(x, y) {
    const worker = Math.floor((y - this.top) / this.row), when = this.time(x);
    const spans = this.data.workers[worker] || [];
    const item = spans.findIndex((span) => span[1] <= when && when <= span[1] + span[2]);
    if (item < 0 || (worker === this.worker && item === this.item)) return;
    this.worker = worker;
    this.item = item;
    this.tell();
    this.draw();
  }

  tell() {
    const span = this.span();
    if (!span) {
      this.chosenText.textContent = `worker ${this.worker}: nothing recorded`;
      return;
    }
    const [kind, begin, length, batch, row, column, first, last, chunk, operand] = span;
    const parts = [`worker ${this.worker}`, `${NAMES[kind]} (${row}, ${column})${batch ? ` of batch ${batch}` : ""}`];
    if (kind === KIND.part) parts.push(`K steps ${first} to ${last}`);
    if (chunk >= 0) parts.push(`chunk ${chunk}${this.operands.length > 1 ? ` of ${"AB"[operand]}` : ""}`);
    parts.push(`${duration(length)}, from ${duration(begin)} on`);
    this.chosenText.textContent = parts.join(" · ");
  }

  // Drawing ------------------------------------------------------------------------------------------------------------

  resize() {
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.canvas.clientWidth * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.pen = this.canvas.getContext("2d");
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.draw();
  }

  colours() {
    const style = getComputedStyle(this.canvas), of = (name) => style.getPropertyValue(`--${name}`).trim();
    const found = {};
    for (const name of ["page", "text", "faint", "grid", "line", "reduce", "wait", "wait-line", "focus"]) found[name] = of(name);
    found.ramp = of("ramp").split(",").map((hex) => [1, 3, 5].map((i) => parseInt(hex.trim().slice(i, i + 2), 16)));
    found.font = style.fontFamily;
    return found;
  }

  colour(span, colours, rows) {
    const [, , , , row, , , , chunk, operand] = span;
    const times = this.data.arrivals[operand];
    if (this.operands.length && chunk >= 0 && times) return mixed(colours.ramp, chunk / Math.max(times.length - 1, 1));
    return mixed(colours.ramp, row / Math.max(rows - 1, 1));
  }

  draw() {
    const { pen, data } = this, colours = this.colours(), width = this.canvas.clientWidth, bottom = this.height - AXIS;
    pen.clearRect(0, 0, width, this.height);
    pen.font = `12px ${colours.font}`;
    this.axis(pen, colours, width, bottom);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, this.inside + 1, bottom + 1);
    pen.clip();
    this.operands.forEach((operand, place) => this.markers(pen, colours, operand, place * MARKERS, bottom));
    const rows = 1 + Math.max(0, ...data.workers.flatMap((spans) => spans.map((span) => span[4])));
    data.workers.forEach((spans, worker) => this.spans(pen, colours, spans, this.top + worker * this.row, rows));
    const span = this.span();
    if (span) {
      pen.strokeStyle = colours.focus;
      pen.lineWidth = 2;
      const x = this.x(span[1]);
      pen.strokeRect(x - 1, this.top + this.worker * this.row - 1, Math.max(this.x(span[1] + span[2]) - x, 2) + 2, this.row + 2);
    }
    pen.restore();
    this.labels(pen, colours);
    this.range.textContent = `${duration(this.view[0])} to ${duration(this.view[1])}`;
  }

  axis(pen, colours, width, bottom) {
    const length = this.view[1] - this.view[0], step = this.step(length / Math.max(2, this.inside / 90));
    pen.strokeStyle = colours.grid;
    pen.fillStyle = colours.faint;
    pen.textAlign = "center";
    pen.lineWidth = 1;
    const largest = Math.max(Math.abs(this.view[0]), Math.abs(this.view[1]));
    const [unit, factor] = largest < 1000 ? ["us", 1] : largest < 1e6 ? ["ms", 1e3] : ["s", 1e6];
    for (let tick = Math.ceil(this.view[0] / step) * step; tick <= this.view[1]; tick += step) {
      const x = Math.round(this.x(tick)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, bottom);
      pen.stroke();
      pen.fillText(String(Number((tick / factor).toPrecision(10))), Math.min(Math.max(x, LEFT + 10), width - 16), bottom + 15);
    }
    pen.fillText(`${unit} from the launch`, LEFT + this.inside / 2, bottom + 33);
    pen.strokeStyle = colours.faint;
    pen.beginPath();
    pen.moveTo(LEFT, bottom + 0.5);
    pen.lineTo(width - RIGHT, bottom + 0.5);
    pen.stroke();
  }

  step(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least);
  }

  markers(pen, colours, operand, y, bottom) {
    const times = this.data.arrivals[operand];
    times.forEach((when, chunk) => {
      if (when === null) return;
      const x = this.x(Math.max(when, this.whole[0]));
      pen.fillStyle = pen.strokeStyle = mixed(colours.ramp, chunk / Math.max(times.length - 1, 1));
      pen.globalAlpha = 0.5;
      pen.beginPath();
      pen.moveTo(x, y + 14);
      pen.lineTo(x, bottom);
      pen.stroke();
      pen.globalAlpha = 1;
      pen.beginPath();
      pen.moveTo(x - 6, y + 5);
      pen.lineTo(x + 6, y + 5);
      pen.lineTo(x, y + 15);
      pen.fill();
    });
  }

  spans(pen, colours, spans, top, rows) {
    const gap = this.row >= 8 ? this.row * 0.1 : this.row >= 6 ? 0.5 : 0;
    let painted = -1; // pixels that earlier spans of the row fill: what is thinner is not drawn again
    for (const span of spans) {
      const begin = this.x(span[1]), end = this.x(span[1] + span[2]);
      if (end < LEFT || begin > LEFT + this.inside) continue;
      if (end < painted && end - begin < 0.5) continue;
      painted = Math.max(painted, Math.ceil(end));
      const wide = Math.max(end - begin - (end - begin > 3 ? 0.8 : 0), 0.5); // the gap separates neighbours
      const thin = span[0] === KIND.part ? this.row * 0.22 : span[0] === KIND.wait ? this.row * 0.1 : 0;
      const y = top + gap + thin, high = Math.max(this.row - 2 * gap - 2 * thin, 1);
      if (span[0] === KIND.wait) {
        pen.fillStyle = colours.wait;
        pen.fillRect(begin, y, wide, high);
        if (this.row >= 10) this.hatch(pen, colours, begin, y, wide, high);
      } else {
        pen.fillStyle = span[0] === KIND.reduce ? colours.reduce : this.colour(span, colours, rows);
        pen.fillRect(begin, y, wide, high);
      }
    }
  }

  hatch(pen, colours, x, y, wide, high) {
    const from = Math.max(x, LEFT), to = Math.min(x + wide, LEFT + this.inside);
    pen.save();
    pen.beginPath();
    pen.rect(from, y, to - from, high);
    pen.clip();
    pen.strokeStyle = colours["wait-line"];
    pen.lineWidth = 0.8;
    pen.beginPath();
    for (let at = from - high; at < to; at += 6) {
      pen.moveTo(at, y + high);
      pen.lineTo(at + high, y);
    }
    pen.stroke();
    pen.restore();
  }

  labels(pen, colours) {
    pen.fillStyle = colours.text;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    this.operands.forEach((operand, place) => {
      pen.fillText(this.operands.length > 1 ? `arrivals ${"AB"[operand]}` : "arrivals", LEFT - 8, place * MARKERS + 10);
    });
    const every = [1, 2, 4, 8, 16, 32, 64].find((step) => step * this.row >= 15) || 128;
    this.data.workers.forEach((_, worker) => {
      if (worker % every) return;
      pen.fillText(`worker ${worker}`, LEFT - 8, this.top + (worker + 0.5) * this.row);
    });
    pen.textBaseline = "alphabetic";
  }
}

window.timelines = [...document.querySelectorAll("figure.timeline")].map((figure) => new Timeline(figure));
