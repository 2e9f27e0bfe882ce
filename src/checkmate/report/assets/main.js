// Joins the charts, the tables and the keyboard.
"use strict";

(() => {
  const began = performance.now();
  const step = new Step(JSON.parse(document.getElementById("data").textContent));
  const tooltip = document.getElementById("tooltip");
  const state = { run: Math.min(1, step.runs.length - 1), p: 0, life: null };
  state.p = step.runs[state.run].peak_step;

  const detail = new Detail(document.getElementById("detail"), (life) => choose(state.run, state.p, life));
  const schedule = new ScheduleChart(document.getElementById("schedule"), (p) => choose(state.run, p));
  const charts = step.runs.map((run, index) => new MemoryChart(document.getElementById(`memory-${index}`), run, (p) => choose(index, p)));
  const tabs = [...document.querySelectorAll("[data-run]")];

  function choose(run, p, life = null) {
    Object.assign(state, { run, p, life });
    charts.forEach((chart, index) => chart.select(index === run ? p : null, index === run ? life : null));
    charts.forEach((chart, index) => say(chart, index === run ? p : step.runs[index].peak_step));
    detail.show(step.runs[run], p, life);
    schedule.show(step.runs[run], p);
    legend();
    tabs.forEach((tab) => tab.setAttribute("aria-pressed", `${Number(tab.dataset.run) === run}`));
  }

  function say(chart, p) {
    const { run, canvas } = chart;
    canvas.setAttribute("aria-valuemax", run.computations.length);
    canvas.setAttribute("aria-valuenow", run.position(p) + 1);
    canvas.setAttribute("aria-valuetext", described(run, p));
  }

  function legend() {
    const { cells } = step.runs[state.run].stages(), again = cells.filter((cell) => cell.again).length;
    document.getElementById("schedule-legend").replaceChildren(
      element("span", {}, swatch("activations"), `computed first (${cells.length - again})`), " ",
      element("span", {}, swatch("recomputed"), `computed again (${again})`), " ",
      element("span", {}, swatch("held"), "held"));
  }

  charts.forEach((chart) => {
    chart.canvas.addEventListener("hovered", (event) => {
      const p = event.detail;
      tooltip.hidden = p === null;
      if (p === null) return;
      const lines = step.categories.map((category, row) => [category, chart.run.stack[row][p], step.categoryNames[row]]).filter(([, bytes]) => bytes > 0);
      tooltip.replaceChildren(element("div", {}, described(chart.run, p)),
        ...lines.reverse().map(([category, bytes, name]) => element("div", {}, swatch(category), `${formatBytes(bytes)} ${name}`)));
    });
    chart.canvas.addEventListener("pointermove", (event) => {
      const wide = tooltip.offsetWidth, left = event.clientX + 14 + wide > window.innerWidth ? event.clientX - wide - 14 : event.clientX + 14;
      tooltip.style.left = `${Math.max(4, left)}px`;
      tooltip.style.top = `${event.clientY + 14}px`;
    });
  });
  tabs.forEach((tab) => tab.addEventListener("click", () => choose(Number(tab.dataset.run), step.runs[Number(tab.dataset.run)].peak_step)));

  const planes = () => [...document.querySelector(".legend").children].map((key) => [key.firstChild.className.split(" ")[1], key.innerText]);
  const cells = () => [...document.getElementById("schedule-legend").children].map((key) => [key.firstChild.className.split(" ")[1], key.innerText]);
  const figures = new Map([...charts.map((chart) => [chart.canvas.id, [chart, planes]]), ["schedule", [schedule, cells]]]);
  const image = document.getElementById("curve");
  for (const place of document.querySelectorAll(".slides")) {
    const [chart, legend] = figures.get(place.dataset.of) || [];
    const svg = chart ? () => `data:image/svg+xml,${encodeURIComponent(svgOf(chart, legend()))}` : () => image.src;
    addSaving(place, place.dataset.of, { png: () => (chart ? pngOf(chart, legend()) : pngOfImage(image)), svg });
  }

  const redraw = () => { charts.forEach((chart) => chart.draw()); schedule.draw(); };
  window.addEventListener("resize", redraw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  choose(state.run, state.p);
  window.checkmate = { step, choose, state, figures, drawn_ms: performance.now() - began };
})();
