// Accuracy over (lr, lam): one panel for each method and p. Python computed the polygons.

function drawScale(host, { levels, colours, surfaces }) {
  host.hidden = !surfaces.some(({ bands }) => bands.length);
  const bands = colours.map((fill, place) =>
    h("div", { class: "band" },
      place < levels.length ? h("span", {}, significant(levels[place])) : null,
      h("i", { style: { "--c": fill } })));
  host.replaceChildren(h("span", { class: "unit" }, "validation accuracy, %"), h("div", { class: "bands" }, ...bands));
}

function drawContours(host, contours) {
  host.replaceChildren();
  const shown = contours.surfaces.filter((surface) => isShown(surface));
  if (!shown.length) {
    host.append(h("p", { class: "empty" }, contours.surfaces.length
      ? "All panels are hidden: enable a method or a p."
      : "No contours: none of the methods has a lam."));
    return;
  }
  for (const surface of shown.filter(({ bands }) => bands.length)) {
    const plot = h("div", {});
    host.append(h("div", { class: "panel" }, h("h4", {}, noBreak(surface.title)), h("p", {}, surface.note), plot));
    drawSurface(plot, surface, contours);
  }
  const missing = shown.filter(({ bands }) => !bands.length);
  const reasons = missing.map(({ title, note }) => h("p", {}, h("b", {}, noBreak(title)), ` ${note}.`));
  if (missing.length > 3) {
    host.append(h("details", { class: "panel" },
      h("summary", {}, `${missing.length} more without contours`), ...reasons));
  } else if (missing.length) {
    host.append(h("div", { class: "panel" }, ...reasons));
  }
}

function drawSurface(host, surface, { colours }) {
  const box = frame(host, { height: 250, left: 62, name: `Contours, ${surface.title}` });
  const { svg, x0, x1, y0, y1 } = box;
  const x = linear([0, 1], [x0, x1]);
  const y = linear([0, 1], [y0, y1]);
  const ticks = (scale, list) => list.map(([at, label]) => ({ at: scale(at), label }));
  drawAxes(box, ticks(x, surface.xTicks), [], "learning rate", "lam");
  for (const { at, label } of ticks(y, surface.yTicks)) {
    svg.append(s("text", { x: x0 - 7, y: at, "text-anchor": "end", "dominant-baseline": "central" }, label));
  }
  svg.append(s("line", { class: "axis", x1: x0, x2: x0, y1: y0, y2: y1 }));

  // Polygons are in shares of the axes; the group scales them to pixels, with y pointing up.
  const stretched = s("g", { transform: `translate(${x0} ${y0}) scale(${x1 - x0} ${y1 - y0})` });
  surface.bands.forEach((path, place) => {
    if (!path) return;
    stretched.append(s("path", {
      d: path, fill: colours[place], stroke: colours[place], "stroke-width": 0.6,
      "fill-rule": "evenodd", "vector-effect": "non-scaling-stroke",
    }));
  });
  for (const kind of ["sparsity under", "sparsity"]) {
    for (const line of surface.lines) stretched.append(s("path", { class: kind, d: line.path }));
  }
  svg.append(stretched);

  const marks = [];
  for (const cell of surface.cells) {
    const [cx, cy] = [x(cell.x), y(cell.y)];
    if (cell.point === null) {
      svg.append(s("path", {
        class: cell.diverged ? "cell diverged" : "cell gap",
        d: cell.diverged ? `M${cx - 4} ${cy - 4}l8 8m0 -8l-8 8` : `M${cx - 3.5} ${cy - 3.5}h7v7h-7z`,
      }, s("title", {}, `lr ${cell.lr}, lam ${cell.lam}: ${cell.diverged ? "diverged" : "not run"}`)));
      continue;
    }
    const point = view.experiment.points.means[cell.point];
    const node = s("circle", { class: "cell", cx, cy, r: 2.6 });
    svg.append(node);
    marks.push({ x: cx, y: cy, node, point, tip: () => tipOf(point), choose: () => choosePoint(point) });
  }
  for (const line of surface.lines) {
    svg.append(s("text", { class: "sparsity-label", x: x(line.at[0]), y: y(line.at[1]) }, line.label));
  }
  interactive(svg, marks);
  highlights.push((run) => {
    for (const old of svg.querySelectorAll(".chosen")) old.remove();
    const mark = marks.find(({ point }) => point.runs.includes(run));
    if (!mark) return;
    for (const kind of ["chosen on-map under", "chosen on-map"]) {
      svg.append(s("circle", { class: kind, cx: mark.x, cy: mark.y, r: 8 }));
    }
  });
}
