// Classes: the regions of four classifiers, and rings around points that the others contradict.

import { Plot } from "../plot.js";

const COLOURS = [[224, 138, 0], [47, 127, 209], [28, 158, 119]];

export function make(view) {
  const { about, state } = view;
  const range = about.fields.points.columns[0].slice(1), most = about.fields.points.most;
  const plots = Object.fromEntries(Object.entries(about.panels).map(([name, panel]) => [name, new Plot(panel, { x: range, y: range, square: true })]));
  Object.values(plots).forEach((plot, order) => {
    view.panels.append(plot.figure);
    plot.draggable({
      move: (i, x, y) => { state.points[i] = [x, y, state.points[i][2]]; view.set({ points: state.points }); },
      add: (x, y) => { if (state.points.length < most) view.set({ points: [...state.points, [x, y, Number(state.brush)]] }); },
      remove: (i) => view.set({ points: state.points.filter((_, k) => k !== i) }),
    });
    if (!order) plot.root.setAttribute("tabindex", "0");
  });
  view.button("Remove suspects", () => {
    const suspects = new Set(Object.values(window.play.answer?.suspects ?? {}).flat());
    view.set({ points: state.points.filter((_, i) => !suspects.has(i)) });
  });
  view.button("Remove all points", () => view.set({ points: [] }), "quiet");
  let suspects = {};
  const dots = () => Object.entries(plots).forEach(([name, plot], order) => plot.points(state.points, {
    focus: order === 0, shape: (i) => state.points[i][2], look: (i) => `class-${state.points[i][2]}`, ring: (i) => suspects[name]?.includes(i),
    label: (i) => `point ${i + 1}, class ${state.points[i][2] + 1}`,
  }));

  return {
    sketch: dots,
    draw(answer) {
      suspects = answer.suspects;
      for (const [name, plot] of Object.entries(plots)) {
        const found = answer.found[name];
        plot.image(found ?? "-".repeat(answer.grid ** 2), answer.grid, (c) => (c === "-" ? [0, 0, 0, 0] : [...COLOURS[c], 62]));
        plot.number.value = found ? `${answer.wrong[name]} wrong, ${suspects[name].length} suspects` : "two colours are needed";
      }
      dots();
      view.tell({ points: String(state.points.length), ...Object.fromEntries(Object.entries(answer.suspects).map(([name, list]) => [`suspects, ${about.panels[name].title}`, list.length ? list.map((i) => i + 1).join(", ") : "none"])) });
    },
  };
}
