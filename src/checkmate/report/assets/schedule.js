// Stages by ops: the ops that each stage computes, and those whose values are held when it begins.
"use strict";

class ScheduleChart {
  constructor(canvas, onSelect) {
    Object.assign(this, { canvas, run: null, selected: null });
    canvas.addEventListener("click", (event) => { const cell = this.cellAt(event); if (cell) onSelect(cell.p); });
  }

  show(run, selected) {
    Object.assign(this, { run, selected });
    this.draw();
  }

  get #scale() {
    const box = this.canvas.getBoundingClientRect(), { rows } = this.run.stages(), ops = this.run.step.ops.name.length;
    const wide = (box.width - MARGIN.left - MARGIN.right) / Math.max(1, ops);
    const high = (box.height - MARGIN.top - MARGIN.bottom) / Math.max(1, rows);
    return { wide, high, x: (op) => MARGIN.left + op * wide, y: (row) => MARGIN.top + row * high };
  }

  // The computation nearest to the pointer, in its row.
  cellAt(event) {
    const box = this.canvas.getBoundingClientRect(), scale = this.#scale, { cells, rows } = this.run.stages();
    const row = Math.min(rows - 1, Math.max(0, Math.floor((event.clientY - box.top - MARGIN.top) / scale.high)));
    const op = (event.clientX - box.left - MARGIN.left) / scale.wide;
    let best = null;
    for (const cell of cells) if (cell.row === row && (!best || Math.abs(cell.op - op) < Math.abs(best.op - op))) best = cell;
    return best;
  }

  draw() {
    if (!this.run) return;
    const [context, width, height] = fitted(this.canvas), scale = this.#scale;
    const { cells, held, rows } = this.run.stages(), ops = this.run.step.ops.name.length;
    context.fillStyle = colour("held");
    for (const span of held) context.fillRect(scale.x(span.op), scale.y(span.from), Math.max(0.8, scale.wide), (span.to - span.from) * scale.high);
    const size = Math.max(2, Math.min(scale.wide, scale.high)), wide = Math.max(size, scale.wide), high = Math.max(size, scale.high);
    for (const again of [false, true]) {
      context.fillStyle = colour(again ? "recomputed" : "activations");
      for (const cell of cells) if (cell.again === again) context.fillRect(scale.x(cell.op), scale.y(cell.row), wide, high);
    }
    context.strokeStyle = colour("rule");
    context.strokeRect(MARGIN.left, MARGIN.top, width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom);
    context.fillStyle = colour("soft");
    context.textAlign = "right"; context.textBaseline = "middle";
    for (const t of ticks(rows, 5)) if (t < rows) context.fillText(`${Math.round(t)}`, MARGIN.left - 6, scale.y(t) + 6);
    context.textAlign = "center"; context.textBaseline = "top";
    for (const t of ticks(ops, 6)) if (t < ops) context.fillText(`${Math.round(t)}`, scale.x(t) + scale.wide / 2, height - MARGIN.bottom + 6);
    context.textAlign = "right";
    context.fillText("op, in the order of the graph; time runs down", width - MARGIN.right, height - MARGIN.bottom + 20);
    const cell = this.selected === null ? null : cells[this.run.position(this.selected)];
    if (cell) {
      context.strokeStyle = colour("ink");
      context.strokeRect(scale.x(cell.op) - 3, scale.y(cell.row) - 3, wide + 6, high + 6);
    }
  }
}
