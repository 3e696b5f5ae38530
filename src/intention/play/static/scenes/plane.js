// Plane: four heat maps of one linear problem; the cloud and the true direction can be dragged.

import { element, shown, svg } from "../dom.js";
import { Plot, diverging } from "../plot.js";

export function make(view) {
  const { about, state } = view;
  const own = about.fields.points.columns[0].slice(1), most = about.fields.points.most;
  const blank = { title: "The problem: v = w · k", colour: "text" };
  const problem = new Plot(blank, { x: own, y: own, square: true });
  problem.figure.classList.add("first");
  view.panels.append(problem.figure);
  const body = element("tbody");
  problem.figure.append(element("table", { class: "told" }, element("thead", {}, element("tr", {}, ...["", "values", "correlation", "slope"].map((text) => element("th", { scope: "col" }, text)))), body));
  const plots = {}, scatter = {};
  for (const [name, panel] of Object.entries(about.panels)) {
    plots[name] = new Plot(panel, { x: own, y: own, square: true, width: 240 });
    scatter[name] = new Plot({ title: "true → predicted", colour: panel.colour }, { x: [-1, 1], y: [-1, 1], width: 240, height: 74, bare: true });
    plots[name].figure.append(scatter[name].root);
    scatter[name].root.classList.add("scatter");
    view.panels.append(plots[name].figure);
  }
  problem.draggable({
    move: (i, x, y) => {
      if (i === state.points.length) view.set({ truth: [[x, y]] });
      else { state.points[i] = [x, y]; view.set({ points: state.points }); }
    },
    add: (x, y) => { if (state.points.length < most) view.set({ points: [...state.points, [x, y]] }); },
    remove: (i) => { if (i < state.points.length) view.set({ points: state.points.filter((_, k) => k !== i) }); },
  });
  problem.root.setAttribute("tabindex", "0");

  return {
    sketch() {
      const [w] = state.truth, rows = [...state.points, w];
      problem.item("marks", "w", "line", { x1: problem.sx(0), y1: problem.sy(0), x2: problem.sx(w[0]), y2: problem.sy(w[1]), class: "arrow" });
      problem.points(rows, { focus: true, look: (i) => (i === state.points.length ? "truth" : ""), label: (i) => (i === state.points.length ? "true direction w" : `point ${i + 1}`) });
      for (const one of view.root.querySelectorAll('.mark[data-of="scale"]')) one.textContent = state.scale === "alpha" ? "(1+α) " : "";
    },
    draw(answer) {
      const { grid, reach } = answer, far = Math.max(...answer.true.map(Math.abs)) || 1;
      problem.number.value = "drag the cloud and w";
      if (reach === own[1]) problem.image(answer.true, grid, fade(diverging(far)));
      else problem.picture(EMPTY);
      for (const [name, plot] of Object.entries(plots)) {
        plot.range([-reach, reach], [-reach, reach]);
        const found = answer.found[name], told = answer.agreement[name];
        if (!found) { plot.picture(EMPTY); plot.points([], { still: true }); continue; }
        const most = Math.max(...found.map(Math.abs)) || 1;
        plot.image(found, grid, diverging(most));
        plot.points(state.points.filter(([x, y]) => Math.max(Math.abs(x), Math.abs(y)) <= reach), { still: true, look: () => "small" });
        scatterOf(scatter[name], answer.true, found, far, most);
        scatter[name].root.setAttribute("aria-label", `correlation ${shown(told.correlation)}, slope ${shown(told.slope)}`);
      }
      body.replaceChildren(...Object.entries(about.panels).map(([name, { title, colour }]) => {
        const { correlation, slope } = answer.agreement[name] ?? {};
        const cells = [answer.found[name] ? `±${shown(Math.max(...answer.found[name].map(Math.abs)), 2)}` : "–", shown(correlation), shown(slope)];
        return element("tr", {}, element("th", { scope: "row" }, element("span", { class: `dot c-${colour}` }), title), ...cells.map((text) => element("td", {}, text)));
      }));
    },
  };
}

function scatterOf(plot, truth, found, far, most) {
  plot.x = [-far * 1.05, far * 1.05]; plot.y = [-most * 1.1, most * 1.1];
  let dots = "";
  for (let i = 0; i < truth.length; i += 3) dots += `M${plot.sx(truth[i]).toFixed(1)} ${plot.sy(found[i]).toFixed(1)}h.01`;
  plot.item("curves", "dots", "path", { d: dots, class: `dots c-${plot.colour}` });
  if (!plot.items.has("marks/label")) plot.layers.marks.append(svg("text", { x: plot.width - 8, y: plot.height - 8, "text-anchor": "end" }, "true → predicted")), plot.items.set("marks/label", plot.layers.marks.lastChild);
}

const EMPTY = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw==";
const fade = (paint) => (value) => { const [r, g, b] = paint(value); return [r, g, b, 90]; };
