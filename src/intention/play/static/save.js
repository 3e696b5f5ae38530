// The picture as an SVG file: all panels of the scene beside one another, with the colours that the page shows.

import { svg } from "./dom.js";

const LOOK = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity", "font-family", "font-size", "font-weight", "text-anchor", "image-rendering"];

export function save(panels, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([picture(panels)], { type: "image/svg+xml" }));
  link.download = `${name}.svg`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export function picture(panels) {
  const outer = panels.getBoundingClientRect(), page = getComputedStyle(document.body);
  const root = svg("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${outer.width} ${outer.height}`, width: outer.width, height: outer.height });
  root.append(svg("rect", { width: outer.width, height: outer.height, fill: page.backgroundColor }));
  for (const plot of panels.querySelectorAll("svg.plot")) {
    const box = plot.getBoundingClientRect(), copy = plot.cloneNode(true);
    const before = [plot, ...plot.querySelectorAll("*")], after = [copy, ...copy.querySelectorAll("*")];
    before.forEach((one, i) => {
      const look = getComputedStyle(one);
      for (const property of LOOK) if (look.getPropertyValue(property)) after[i].setAttribute(property, look.getPropertyValue(property));
      after[i].removeAttribute("class"); after[i].removeAttribute("tabindex");
    });
    for (const [key, value] of Object.entries({ x: box.left - outer.left, y: box.top - outer.top, width: box.width, height: box.height })) copy.setAttribute(key, value);
    root.append(copy);
    const title = plot.closest("figure")?.querySelector("figcaption b"), place = title?.getBoundingClientRect();
    if (title) root.append(svg("text", { x: place.left - outer.left, y: place.bottom - outer.top - 5, fill: page.color, "font-family": "sans-serif", "font-size": 14, "font-weight": 600 }, title.textContent));
  }
  return new XMLSerializer().serializeToString(root);
}
