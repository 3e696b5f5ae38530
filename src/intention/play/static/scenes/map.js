// Map: KVQ space as a diagram whose boxes compute.

import { element } from "../dom.js";
import { Plot } from "../plot.js";

const OPENS = { intention: "#line", sigma_intention: "#line?scale=alpha", linear_attention: "#plane", attention: "#rabbit", erf: "#line", neural_process: "#sine" };

export function make(view) {
  const { about, state, scenes } = view;
  const [[, xl, xh], [, yl, yh]] = about.fields.points.columns;
  const plots = {};
  const grid = element("div", { class: "space" }, element("p", { class: "name" }, element("b", {}, "KVQ space"), " the pairs (K, V) have no order; the answers have the order of Q"));
  for (const [name, panel] of Object.entries(about.panels)) {
    const plot = plots[name] = new Plot(panel, { x: [xl, xh], y: [yl, yh], bare: true, height: 170 });
    const [scene] = OPENS[name].slice(1).split("?"), there = scene in scenes;
    plot.figure.classList.add(`box-${name}`);
    plot.figure.querySelector("figcaption").append(element("a", { class: "open", href: there ? OPENS[name] : "#line" }, `Open ${scenes[there ? scene : "line"].title} →`));
    plot.draggable({
      move: (i, x, y) => { state.points[i] = [x, y]; view.set({ points: state.points }); },
      add: (x, y) => { if (state.points.length < about.fields.points.most) view.set({ points: [...state.points, [x, y]] }); },
      remove: (i) => view.set({ points: state.points.filter((_, k) => k !== i) }),
    });
    grid.append(plot.figure);
  }
  grid.append(
    element("p", { class: "way right way-top" }, "softmax"), element("p", { class: "way right way-middle" }, "softmax"),
    element("p", { class: "way down way-left" }, "α → ∞, times 1 + α"), element("p", { class: "way down way-other" }, "α → ∞, times 1 + α"));
  plots.intention.root.setAttribute("tabindex", "0");
  const more = Object.values(scenes).filter(({ name }) => name !== "map").map(({ name, title, lead }) => element("a", { href: `#${name}`, class: "tile" }, element("b", {}, title), element("span", {}, lead)));
  view.panels.append(grid, element("nav", { class: "tiles", "aria-label": "All scenes" }, ...more));

  return {
    sketch() { for (const [name, plot] of Object.entries(plots)) plot.points(state.points, { focus: name === "intention", look: () => "small" }); },
    draw(answer) {
      for (const [name, plot] of Object.entries(plots)) plot.curve("own", answer.x, answer.found[name]);
      for (const [name, limit] of [["intention", "linear_attention"], ["sigma_intention", "attention"]]) plots[name].curve("limit", answer.x, answer.found[limit], `limit c-${limit}`);
    },
  };
}
