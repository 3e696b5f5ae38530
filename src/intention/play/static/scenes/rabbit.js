// Rabbit: five points and where they went; four computations move the rest.

import { Plot } from "../plot.js";

export function make(view) {
  const { about, state } = view;
  const range = about.fields.points.columns[0].slice(1);
  const plots = Object.fromEntries(Object.entries(about.panels).map(([name, panel]) => [name, new Plot(panel, { x: range, y: range, square: true, bare: true })]));
  const parts = ["nose", "tail", "front paw", "ear", "back"];
  Object.values(plots).forEach((plot, order) => {
    view.panels.append(plot.figure);
    plot.draggable({ move: (i, x, y) => { state.points[i] = [x, y]; view.set({ points: state.points }); } });
    if (!order) plot.root.setAttribute("tabindex", "0");
  });
  let last = null;
  view.button("Shake", () => view.set({ points: state.points.map((row) => row.map((x) => +Math.max(range[0], Math.min(range[1], x + 0.8 * (Math.random() - 0.5))).toFixed(2))) }));
  view.button("Back to the start", () => { if (last) view.set({ points: last.key.map((row) => [...row]) }); });
  const dots = (plot, rows) => rows.map(([x, y]) => `M${plot.sx(x).toFixed(1)} ${plot.sy(y).toFixed(1)}h.01`).join("");

  return {
    sketch() { Object.values(plots).forEach((plot, order) => plot.points(state.points, { focus: order === 0, label: (i) => parts[i] })); },
    draw(answer) {
      last = answer;
      for (const [name, plot] of Object.entries(plots)) {
        const flat = answer.found[name], rows = [];
        for (let i = 0; i < flat.length; i += 2) rows.push([flat[i], flat[i + 1]]);
        plot.item("curves", "before", "path", { d: dots(plot, answer.cloud), class: "dots before" });
        plot.item("curves", "after", "path", { d: dots(plot, rows.filter(([x]) => x !== null)), class: `dots after c-${plot.colour}` });
        answer.key.forEach(([x, y], i) => {
          const [u, v] = state.points[i];
          plot.item("marks", `way-${i}`, "line", { x1: plot.sx(x), y1: plot.sy(y), x2: plot.sx(u), y2: plot.sy(v), class: "way-line" });
          plot.item("marks", `key-${i}`, "circle", { cx: plot.sx(x), cy: plot.sy(y), r: 3.6, class: "key" });
        });
      }
    },
  };
}
