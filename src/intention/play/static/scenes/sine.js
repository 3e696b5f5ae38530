// Sine: observations slide along a wave; trained models and the one at step 0 complete it.

import { shown } from "../dom.js";
import { Plot } from "../plot.js";

export function make(view) {
  const { about, state } = view;
  const [[, xl, xh]] = about.fields.points.columns, most = about.fields.points.most, Y = [-6, 6];
  const plots = {};
  for (const [name, panel] of Object.entries(about.panels)) {
    plots[name] = new Plot(panel, name === "errors" ? { x: [0, 20], y: [-4, 2] } : { x: [xl, xh], y: Y });
    view.panels.append(plots[name].figure);
  }
  const { errors, ...curves } = plots;
  const wave = (x) => state.amplitude * Math.sin(x - state.phase);
  const edit = {
    move: (i, x) => { state.points[i] = [x]; view.set({ points: state.points }); },
    add: (x) => { if (state.points.length < most) view.set({ points: [...state.points, [x]] }); },
    remove: (i) => view.set({ points: state.points.filter((_, k) => k !== i) }),
  };
  Object.values(curves).forEach((plot) => plot.draggable(edit));
  plots.intention.root.setAttribute("tabindex", "0");
  view.button("One more observation", () => edit.add(+(xl + (xh - xl) * Math.random()).toFixed(2)));
  view.button("One less", () => edit.remove(state.points.length - 1));
  view.button("Another wave", () => view.set({ amplitude: +(0.5 + 4.4 * Math.random()).toFixed(2), phase: +(3.1 * Math.random()).toFixed(2) }));
  const log = (x) => Math.log10(Math.max(x, 1e-5));
  errors.relabel((y) => (Number.isInteger(y) ? `10${[..."" + y].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("")}` : ""));

  return {
    sketch() {
      for (const [name, plot] of Object.entries(curves)) plot.points(state.points.map(([x]) => [x, wave(x)]), { focus: name === "intention", label: (i) => `observation ${i + 1}` });
    },
    draw(answer) {
      errors.forget("marks");
      for (const [name, plot] of Object.entries(curves)) {
        plot.curve("truth", answer.x, answer.true, "truth");
        plot.curve("own", answer.x, answer.found[name]);
        const error = answer.errors[name]?.at(-1);
        plot.number.value = error === undefined ? "" : `error ${shown(error, 2)}`;
        errors.curve(name, answer.counts ?? [], answer.errors[name]?.map(log) ?? [], `thin c-${about.panels[name].colour}`);
        answer.errors[name]?.forEach((e, i) => errors.item("marks", `${name}-${i}`, "circle", { cx: errors.sx(answer.counts[i]), cy: errors.sy(Math.max(-4, log(e))), r: 3, class: `bead c-${about.panels[name].colour}` }));
      }
      view.tell({ observations: String(state.points.length), ...Object.fromEntries(Object.entries(answer.errors).map(([name, list]) => [about.panels[name].title, shown(list.at(-1), 2)])) });
    },
  };
}
