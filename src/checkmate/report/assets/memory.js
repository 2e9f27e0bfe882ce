// The bytes of one run over its ops, stacked by category.
"use strict";

const MARGIN = { left: 64, right: 12, top: 14, bottom: 34 };

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }

// A canvas as large as its box, in device pixels; returns the context and the size in CSS pixels.
function fitted(canvas) {
  if (canvas.slide) return canvas.slide;
  const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(box.width * ratio));
  canvas.height = Math.max(1, Math.round(box.height * ratio));
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, box.width, box.height);
  context.font = "12px system-ui, sans-serif";
  return [context, box.width, box.height];
}

// Round numbers from zero to a limit.
function ticks(most, wanted) {
  if (!(most > 0)) return [0];
  const raw = most / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw) * power;
  const found = [];
  for (let t = 0; t <= most * 1.0001; t += size) found.push(t);
  return found;
}

class MemoryChart {
  constructor(canvas, run, onSelect) {
    Object.assign(this, { canvas, run, onSelect, selected: null, hovered: null, life: null });
    canvas.addEventListener("pointermove", (event) => this.hover(this.#at(event)));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("click", (event) => onSelect(this.#at(event)));
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  get #scale() {
    const step = this.run.step, box = this.canvas.getBoundingClientRect();
    const width = box.width - MARGIN.left - MARGIN.right, height = box.height - MARGIN.top - MARGIN.bottom;
    const longest = step.longest || 1, most = (step.most || 1) * 1.06;
    return {
      x: (cost) => MARGIN.left + (width * cost) / longest,
      y: (bytes) => MARGIN.top + height * (1 - bytes / most),
      cost: (x) => ((x - MARGIN.left) / width) * longest,
    };
  }

  #at(event) {
    const cost = this.#scale.cost(event.clientX - this.canvas.getBoundingClientRect().left), edges = this.run.edges;
    let low = 0, high = this.run.computations.length - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (edges[middle] <= cost) low = middle; else high = middle - 1; }
    return this.run.computations[low];
  }

  #key(event) {
    const { computations, peak_step: peak } = this.run, last = computations.length - 1;
    const now = this.run.position(this.selected ?? peak), far = Math.max(10, Math.round(last / 50));
    const moves = {
      ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - far, PageDown: now + far, Home: 0, End: last,
      p: this.run.position(peak), P: this.run.position(peak),
    };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.onSelect(computations[Math.min(last, Math.max(0, moves[event.key]))]);
  }

  hover(p) {
    if (p === this.hovered) return;
    this.hovered = p;
    this.draw();
    this.canvas.dispatchEvent(new CustomEvent("hovered", { detail: p }));
  }

  select(p, life = null) {
    Object.assign(this, { selected: p, life });
    this.draw();
  }

  draw() {
    const { run } = this, { step, computations, edges } = run, scale = this.#scale;
    const [context, width, height] = fitted(this.canvas);
    this.#axes(context, width, height, scale);
    const base = new Float64Array(computations.length);
    step.categories.forEach((category, row) => {
      if (!run.stack[row].some((bytes) => bytes > 0)) return;
      context.beginPath();
      computations.forEach((p, k) => {
        const y = scale.y(base[k] + run.stack[row][p]);
        context.lineTo(scale.x(edges[k]), y);
        context.lineTo(scale.x(edges[k + 1]), y);
      });
      for (let k = computations.length - 1; k >= 0; k -= 1) {
        context.lineTo(scale.x(edges[k + 1]), scale.y(base[k]));
        context.lineTo(scale.x(edges[k]), scale.y(base[k]));
      }
      context.closePath();
      context.fillStyle = colour(category);
      context.fill();
      computations.forEach((p, k) => { base[k] += run.stack[row][p]; });
    });
    if (run.measured) this.#measured(context, scale);
    if (this.life !== null) this.#lifetime(context, scale);
    if (step.budget) this.#level(context, scale.y(step.budget), width, colour("budget"), `budget ${formatBytes(step.budget)}`);
    this.#marker(context, scale, run.peak_step, colour("ink"), true);
    if (this.hovered !== null) this.#cursor(context, scale, height, this.hovered, [2, 3]);
    if (this.selected !== null) this.#cursor(context, scale, height, this.selected, []);
  }

  #axes(context, width, height, scale) {
    const { step } = this.run;
    context.fillStyle = colour("soft");
    context.strokeStyle = colour("rule");
    context.textAlign = "right";
    context.textBaseline = "middle";
    const [size, unit] = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]].find(([bytes]) => step.most >= bytes) || [1, "B"];
    for (const t of ticks(step.most / size, 4)) {
      const y = scale.y(t * size);
      context.beginPath(); context.moveTo(MARGIN.left, y); context.lineTo(width - MARGIN.right, y); context.stroke();
      context.fillText(`${+t.toFixed(3)} ${unit}`, MARGIN.left - 6, y);
    }
    context.textBaseline = "top";
    const all = ticks(step.longest, width < 560 ? 3 : 6);
    all.forEach((t, k) => {
      context.textAlign = k === 0 ? "left" : scale.x(t) + 24 > width ? "right" : "center";
      context.fillText(k === 0 ? "0" : formatCost(t, step.cost_unit), scale.x(t), height - MARGIN.bottom + 6);
    });
    context.textAlign = "right";
    context.fillText("cost of the ops so far", width - MARGIN.right, height - MARGIN.bottom + 20);
  }

  #level(context, y, width, ink, text) {
    context.strokeStyle = ink;
    context.lineWidth = 1.5;
    context.setLineDash([6, 4]);
    context.beginPath(); context.moveTo(MARGIN.left, y); context.lineTo(width - MARGIN.right, y); context.stroke();
    context.setLineDash([]);
    context.lineWidth = 1;
    context.textAlign = "right"; context.textBaseline = "bottom";
    context.fillStyle = ink;
    context.fillText(text, width - MARGIN.right - 2, y - 2);
  }

  // Measured bytes, by the share of the step.
  #measured(context, scale) {
    const { edges, measured } = this.run, whole = edges[edges.length - 1];
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.3;
    context.beginPath();
    measured.forEach(([share, bytes], k) => {
      if (k) context.lineTo(scale.x(whole * share), scale.y(measured[k - 1][1]));
      context.lineTo(scale.x(whole * share), scale.y(bytes));
    });
    context.stroke();
    context.lineWidth = 1;
  }

  #middle(p) {
    const k = this.run.position(p);
    return (this.run.edges[k] + this.run.edges[k + 1]) / 2;
  }

  #marker(context, scale, p, ink) {
    context.fillStyle = ink;
    context.beginPath();
    context.arc(scale.x(this.#middle(p)), scale.y(this.run.total[p]), 3.5, 0, 2 * Math.PI);
    context.fill();
  }

  #cursor(context, scale, height, p, dash) {
    const x = scale.x(this.#middle(p));
    context.strokeStyle = colour("ink");
    context.setLineDash(dash);
    context.beginPath(); context.moveTo(x, MARGIN.top); context.lineTo(x, height - MARGIN.bottom); context.stroke();
    context.setLineDash([]);
  }

  // The lifetime of the chosen value, as a bar along the bottom.
  #lifetime(context, scale) {
    const { run } = this, { lives } = run;
    const first = run.position(lives.made[this.life]), last = run.position(Math.min(lives.gone[this.life], run.steps.length) - 1);
    const x = scale.x(run.edges[first]), wide = Math.max(3, scale.x(run.edges[last + 1]) - x);
    context.fillStyle = colour("ink");
    context.fillRect(x, scale.y(0) + 1, wide, 4);
    context.globalAlpha = 0.12;
    context.fillRect(x, MARGIN.top, wide, scale.y(0) - MARGIN.top);
    context.globalAlpha = 1;
  }
}
