// PNG and SVG of the figures, for slides: a figure draws as it does on the page, onto more pixels or into elements of SVG.
"use strict";

// Entries of a legend with their places in rows below a figure, and the height of all rows.
function placed(legend, width) {
  const ruler = document.createElement("canvas").getContext("2d");
  ruler.font = "12px system-ui, sans-serif";
  let [x, y] = [MARGIN.left, 13];
  const entries = legend.map(([name, text]) => {
    const wide = 15 + ruler.measureText(text).width;
    if (x > MARGIN.left && x + wide > width) [x, y] = [MARGIN.left, y + 18];
    x += wide + 16;
    return { name, text, x: x - wide - 16, y };
  });
  return [entries, y + 13];
}

// What the figures use of a canvas, written as elements of SVG.
class SvgContext {
  constructor() { Object.assign(this, { parts: [], path: "", dash: [], lineWidth: 1, globalAlpha: 1, textAlign: "left", textBaseline: "top" }); }
  beginPath() { this.path = ""; }
  moveTo(x, y) { this.path += `M${x.toFixed(2)} ${y.toFixed(2)}`; }
  lineTo(x, y) { this.path += `${this.path ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`; }
  closePath() { this.path += "Z"; }
  arc(x, y, r) { this.path += `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`; }
  setLineDash(dash) { this.dash = dash; }
  setTransform() {}
  clearRect() {}
  fill() { this.#add(`<path d="${this.path}" fill="${this.fillStyle}" fill-opacity="${this.globalAlpha}"/>`); }
  stroke() { this.#add(`<path d="${this.path}" fill="none" ${this.#pen()}/>`); }
  fillRect(x, y, w, h) { this.#add(`<rect ${this.#box(x, y, w, h)} fill="${this.fillStyle}" fill-opacity="${this.globalAlpha}"/>`); }
  strokeRect(x, y, w, h) { this.#add(`<rect ${this.#box(x, y, w, h)} fill="none" ${this.#pen()}/>`); }
  fillText(text, x, y) {
    const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
    const below = { top: 10, middle: 4, bottom: -2 }[this.textBaseline] || 0;
    const safe = text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
    this.#add(`<text x="${x.toFixed(2)}" y="${(y + below).toFixed(2)}" text-anchor="${anchor}" fill="${this.fillStyle}">${safe}</text>`);
  }
  #pen() { return `stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}" stroke-dasharray="${this.dash.join(" ")}"`; }
  #box(x, y, w, h) { return `x="${x.toFixed(2)}" y="${y.toFixed(2)}" width="${w.toFixed(2)}" height="${h.toFixed(2)}"`; }
  #add(part) { this.parts.push(part); }
}

// Draws a figure onto a context with a ground and a legend; returns the size.
function drawSlide(chart, context, legend) {
  const box = chart.canvas.getBoundingClientRect(), [entries, rows] = placed(legend, box.width), height = box.height + rows;
  context.fillStyle = colour("ground");
  context.fillRect(0, 0, box.width, height);
  const { selected, hovered, life } = chart;
  chart.canvas.slide = [context, box.width, box.height];
  Object.assign(chart, { selected: null, hovered: null, life: null });
  try { chart.draw(); } finally { Object.assign(chart, { selected, hovered, life }); chart.canvas.slide = null; }
  Object.assign(context, { textAlign: "left", textBaseline: "middle" });
  for (const { name, text, x, y } of entries) {
    context.fillStyle = colour(name === "measured" ? "ink" : name);
    context.fillRect(x, box.height + y - 5, 10, name === "measured" ? 2 : 10);
    context.fillStyle = colour("ink");
    context.fillText(text, x + 15, box.height + y);
  }
  return [box.width, height];
}

function svgOf(chart, legend) {
  const context = new SvgContext(), [width, height] = drawSlide(chart, context, legend);
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" ` +
    `font-family="system-ui, sans-serif" font-size="12">\n${context.parts.join("\n")}\n</svg>\n`;
}

function pngOf(chart, legend) {
  const box = chart.canvas.getBoundingClientRect(), scale = 3, canvas = document.createElement("canvas");
  canvas.width = scale * box.width;
  canvas.height = scale * (box.height + placed(legend, box.width)[1]);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.font = "12px system-ui, sans-serif";
  drawSlide(chart, context, legend);
  return canvas.toDataURL("image/png");
}

// The curve is an SVG image already.
function pngOfImage(image) {
  const scale = 3, canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [scale * image.width, scale * image.height];
  const context = canvas.getContext("2d");
  context.fillStyle = colour("ground");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/png");
}

// Buttons that save a figure; `makers` gives an address by the ending of the file.
function addSaving(place, name, makers) {
  const buttons = Object.entries(makers).map(([ending, address]) => element("button", {
    "aria-label": `Save this figure as ${ending.toUpperCase()}`,
    onclick: () => element("a", { href: address(), download: `${name}.${ending}` }).click(),
  }, ending.toUpperCase()));
  place.append("Save as ", buttons[0], " ", buttons[1]);
}
