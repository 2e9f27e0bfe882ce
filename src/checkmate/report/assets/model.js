// Data of the figures, derived from the embedded graph and plans. Nothing is drawn here.
"use strict";

const NAMES = {
  resident: "parameters and other resident memory", activations: "activations kept", recomputed: "computed again",
  outputs: "outputs, held to the end", gradients: "gradients", updates: "updates of the optimizer", workspace: "workspace",
};

function formatBytes(size) {
  if (Math.abs(size) < 1024) return `${size} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let unit = -1;
  do { size /= 1024; unit += 1; } while (Math.abs(size) >= 1024 && unit < 3);
  // Ties go to the even digit, as in Python.
  const hundredths = size * 100, floor = Math.floor(hundredths);
  const tied = hundredths - floor === 0.5 ? floor + (floor % 2) : Math.round(hundredths);
  return `${(tied / 100).toFixed(2)} ${units[unit]}`;
}

function formatCost(cost, unit) {
  const scale = { ns: 1, us: 1e3, "µs": 1e3, ms: 1e6, s: 1e9 }[unit];
  if (scale === undefined) return `${cost >= 1e5 ? cost.toPrecision(4) : Math.round(cost)} ${unit}`.trim();
  const nanoseconds = cost * scale;
  for (const [size, name, digits] of [[1e9, "s", 2], [1e6, "ms", 1], [1e3, "µs", 1]]) {
    if (nanoseconds >= size) return `${(nanoseconds / size).toFixed(digits)} ${name}`;
  }
  return `${nanoseconds.toFixed(0)} ns`;
}

class Step {
  // The graph, and the runs of it.
  constructor(data) {
    Object.assign(this, data);
    this.categoryNames = data.categories.map((category) => NAMES[category]);
    this.producer = new Int32Array(data.values.name.length);
    data.ops.outputs.forEach((outputs, op) => outputs.forEach((v) => { this.producer[v] = op; }));
    this.runs = data.runs.map((run) => new Run(this, run));
    this.most = Math.max(data.budget || 0, ...this.runs.map((run) => run.peak), ...this.runs.flatMap((run) => (run.measured || []).map(([, bytes]) => bytes)));
    this.longest = Math.max(...this.runs.map((run) => run.edges[run.edges.length - 1]));
  }
  source(op) { return this.strings[this.ops.source[op]]; }
  kind(op) { return this.strings[this.ops.kind[op]]; }
}

class Run {
  constructor(step, data) {
    Object.assign(this, data);
    this.step = step;
    this.computations = [];
    data.steps.forEach((code, p) => { if (code >= 0) this.computations.push(p); });
    const weightless = !this.computations.some((p) => step.ops.cost[data.steps[p]] > 0);
    this.edges = [0];
    for (const p of this.computations) this.edges.push(this.edges[this.edges.length - 1] + (weightless ? 1 : step.ops.cost[data.steps[p]]));
    this.stack = this.#stack();
    this.total = data.steps.map((_, p) => this.stack.reduce((sum, row) => sum + row[p], 0));
    this.again = this.computations.length - new Set(this.computations.map((p) => data.steps[p])).size;
  }

  // Bytes of each category at every step.
  #stack() {
    const { step, lives, steps } = this;
    const rows = step.categories.map(() => new Float64Array(steps.length + 2));
    lives.value.forEach((value, k) => {
      rows[lives.category[k]][lives.made[k]] += step.values.size[value];
      rows[lives.category[k]][lives.gone[k]] -= step.values.size[value];
    });
    rows[step.categories.indexOf("resident")][0] += step.resident;
    const workspace = rows[step.categories.indexOf("workspace")];
    for (const [op, first, last] of this.replays) {
      workspace[first] += step.ops.replay[op];
      workspace[last + 1] -= step.ops.replay[op];
    }
    for (const row of rows) for (let p = 1; p < row.length; p += 1) row[p] += row[p - 1];
    steps.forEach((code, p) => { if (code >= 0) workspace[p] += step.ops.workspace[code]; });
    return rows.map((row) => row.slice(0, steps.length));
  }

  // Position among the computations of the last one that is not after a step.
  position(p) {
    let low = 0, high = this.computations.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.computations[middle] <= p) low = middle; else high = middle - 1;
    }
    return low;
  }

  // Everything that is held while a step runs, largest first: {bytes, name, category, op, life}.
  heldAt(p) {
    const { step, lives } = this;
    const held = [];
    lives.value.forEach((value, k) => {
      const bytes = step.values.size[value];
      if (bytes && lives.made[k] <= p && p < lives.gone[k]) {
        held.push({ bytes, name: step.values.name[value], category: lives.category[k], op: step.producer[value], life: k });
      }
    });
    const workspace = step.categories.indexOf("workspace");
    const add = (bytes, name, category, op) => { if (bytes) held.push({ bytes, name, category, op, life: null }); };
    add(step.resident, "resident", step.categories.indexOf("resident"), null);
    const code = this.steps[p];
    if (code >= 0) add(step.ops.workspace[code], `workspace of ${step.ops.name[code]}`, workspace, code);
    for (const [op, first, last] of this.replays) {
      if (first <= p && p <= last) add(step.ops.replay[op], `state to compute ${step.ops.name[op]} again`, workspace, op);
    }
    return held.sort((a, b) => b.bytes - a.bytes || (a.life ?? -1) - (b.life ?? -1));
  }

  // Computations that read the storage of a life while it lives.
  readsOf(k) {
    const { step, lives, steps } = this;
    const root = step.values.root[lives.value[k]];
    const end = Math.min(lives.gone[k], steps.length);
    const found = [];
    for (let p = lives.made[k] + 1; p < end; p += 1) {
      if (steps[p] >= 0 && step.ops.inputs[steps[p]].some((v) => step.values.root[v] === root)) found.push(p);
    }
    return found;
  }

  // Stages as in Jain et al. (2020): the computations of each row, and the rows at whose begin each op's value is held.
  stages() {
    if (this.cachedStages) return this.cachedStages;
    const { step, steps } = this;
    const cells = [], starts = [], seen = new Set();
    let row = -1, last = Infinity, advanced = true;
    for (const p of this.computations) {
      const op = steps[p];
      if (advanced || op <= last) { row += 1; starts.push(p); }
      const again = seen.has(op);
      cells.push({ row, op, p, again });
      advanced = !again;
      last = op;
      seen.add(op);
    }
    const first = (p) => { // first row that starts after a step
      let low = 0, high = starts.length;
      while (low < high) { const middle = (low + high) >> 1; if (starts[middle] > p) high = middle; else low = middle + 1; }
      return low;
    };
    const held = [], since = new Map();
    const close = (value, p) => {
      const a = first(since.get(value)), b = first(p);
      if (b > a) held.push({ op: step.producer[value], from: a, to: b });
      since.delete(value);
    };
    steps.forEach((code, p) => {
      if (code < 0) { // a free, a fetch from the host, or another copy, which changes nothing here
        const v = -1 - code, count = step.values.size.length;
        if (v > count) since.set(v - count - 1, p); else if (since.has(v)) close(v, p);
        return;
      }
      for (const v of step.ops.outputs[code]) if (!since.has(v)) since.set(v, p);
    });
    for (const value of [...since.keys()]) close(value, steps.length);
    this.cachedStages = { cells, held, rows: row + 1, starts };
    return this.cachedStages;
  }
}
