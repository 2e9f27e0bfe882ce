// Text and tables about the chosen step.
"use strict";

const SHOWN = 15;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value); else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// One line about a step, for the tooltip and for screen readers.
function described(run, p) {
  const { step } = run, op = run.steps[p], k = run.position(p);
  if (op === undefined) return "nothing runs";
  const source = step.source(op), again = run.steps.slice(0, p).includes(op) ? ", computed again" : "";
  return `computation ${k + 1} of ${run.computations.length} (step ${p}): ${step.ops.name[op]}${source ? `, ${source}` : ""}, ` +
    `${step.phases[step.ops.phase[op]]}${again}, ${formatBytes(run.total[p])} held`;
}

function swatch(category) { return element("span", { class: `swatch ${category}`, "aria-hidden": "true" }); }

class Detail {
  constructor(root, onLife) {
    Object.assign(this, { root, onLife, all: false, run: null, step: null });
  }

  show(run, p, life = null) {
    Object.assign(this, { run, step: p });
    const held = run.heldAt(p), { step } = run, shown = this.all ? held : held.slice(0, SHOWN);
    const title = p === run.peak_step ? "What fills the peak" : "What is held";
    const rows = shown.map((entry) => this.#row(entry, entry.life !== null && entry.life === life));
    const rest = held.slice(shown.length), sum = (entries) => entries.reduce((bytes, entry) => bytes + entry.bytes, 0);
    if (rest.length) rows.push(this.#more(rest.length, sum(rest)));
    rows.push(element("tr", { class: "total" }, element("td", { class: "number" }, formatBytes(sum(held))), element("td", { colspan: 4 }, `in all, ${held.length} of them`)));
    const head = ["size", "what", "held as", "made by", "next read by"].map((name) => element("th", { scope: "col" }, name));
    this.root.replaceChildren(
      element("h3", {}, `${title}: ${run.name}`),
      element("p", { id: "chosen" }, described(run, p)),
      element("p", { class: "reading" }, "Everything in memory at this moment, the largest first: which op made it, and which op reads it next and is the reason to keep it."),
      element("table", { id: "held" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)),
      life === null ? element("p", { id: "life", class: "soft" }, "Choose a value above to see how long it lives.") : this.#life(life),
    );
    this.root.dataset.bytes = sum(held);
  }

  #row(entry, chosen) {
    const { step } = this.run, name = entry.life === null ? entry.name
      : element("button", { "aria-pressed": `${chosen}`, "data-life": entry.life, onclick: () => this.onLife(chosen ? null : entry.life) }, entry.name);
    const next = entry.life === null ? undefined : this.run.readsOf(entry.life).find((p) => p >= this.step);
    const made = entry.op === null ? "" : step.kind(entry.op) || step.ops.name[entry.op];
    const source = entry.op === null ? "" : step.source(entry.op);
    return element("tr", { "data-bytes": entry.bytes },
      element("td", { class: "number" }, formatBytes(entry.bytes)),
      element("td", {}, name),
      element("td", {}, swatch(step.categories[entry.category]), step.categoryNames[entry.category]),
      element("td", {}, made, source ? element("span", { class: "soft" }, ` ${source}`) : ""),
      element("td", {}, next === undefined ? "" : step.ops.name[this.run.steps[next]]));
  }

  #more(count, bytes) {
    const show = () => { this.all = true; this.show(this.run, this.step); };
    return element("tr", {}, element("td", { class: "number" }, formatBytes(bytes)),
      element("td", { colspan: 4 }, element("button", { onclick: show }, `${count} more`)));
  }

  #life(k) {
    const { run } = this, { step, lives } = run, value = lives.value[k], stays = lives.gone[k] > run.steps.length;
    const reads = run.readsOf(k), op = step.producer[value];
    const until = stays ? "stays to the end of the step" : `is gone before step ${lives.gone[k]}`;
    const who = reads.slice(0, 8).map((p) => `${step.ops.name[run.steps[p]]} (step ${p})`).join(", ");
    const more = reads.length > 8 ? ` and ${reads.length - 8} more` : "";
    const others = lives.value.filter((v) => v === value).length - 1;
    return element("p", { id: "life", "aria-live": "polite" },
      element("strong", {}, step.values.name[value]), `, ${formatBytes(step.values.size[value])}: made at step ${lives.made[k]} by ` +
      `${step.ops.name[op]}${step.source(op) ? ` (${step.source(op)})` : ""}, ${until}; read by ${who || "no op"}${more}. ` +
      (others ? `It is made ${others + 1} times in all.` : "It is made once."));
  }
}
