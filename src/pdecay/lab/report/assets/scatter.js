// Scatter plots over sparsity: accuracy and trade-off.

/** Create an SVG element; return it with the bounds of its plot area. */
function frame(host, { height, left = 46, right = 20, top = 12, bottom = 44, name }) {
  const width = Math.max(240, Math.round(host.clientWidth));
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": name });
  host.replaceChildren(svg);
  return { svg, width, height, x0: left, x1: width - right, y0: height - bottom, y1: top };
}

function drawAxes(box, xTicks, yTicks, xLabel, yLabel) {
  const { svg, x0, x1, y0, y1, height } = box;
  for (const { at, label } of yTicks) {
    svg.append(
      s("line", { class: "grid", x1: x0, x2: x1, y1: at, y2: at }),
      s("text", { x: x0 - 7, y: at, "text-anchor": "end", "dominant-baseline": "central" }, label),
    );
  }
  svg.append(s("line", { class: "axis", x1: x0, x2: x1, y1: y0, y2: y0 }));
  for (const { at, label } of thinned(xTicks, textWidth)) {
    svg.append(
      s("line", { class: "axis", x1: at, x2: at, y1: y0, y2: y0 + 4 }),
      s("text", { x: at, y: y0 + 18, "text-anchor": "middle" }, label),
    );
  }
  svg.append(s("text", { class: "label", x: (x0 + x1) / 2, y: height - 6, "text-anchor": "middle" }, xLabel));
  if (yLabel) {
    const middle = (y0 + y1) / 2;
    svg.append(s("text", {
      class: "label", x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})`,
    }, yLabel));
  }
}

/** Find the position next to a horizontal line where a label covers the fewest marks. */
function quietPlace({ x0, x1, y0, y1 }, marks, at, text) {
  const width = 7.6 * text.length + 8; // bold text
  const places = [[x1 - width, -17], [x1 - width, 4], [x0 + 4, -17], [x0 + 4, 4]]
    .filter(([, up]) => at + up > y1 - 10 && at + up + 14 < y0)
    .map(([left, up]) => ({
      x: left + 4, y: at + up + 11,
      hidden: marks.filter(({ x, y }) => x > left - 6 && x < left + width + 6 && y > at + up - 6 && y < at + up + 20).length,
    }));
  const { x, y } = places.reduce((best, place) => (place.hidden < best.hidden ? place : best));
  return { x, y };
}

const SIZE = 5.2; // radius of a marker in pixels

/**
 * Draw points over sparsity. Returns the number of cropped points, which are drawn at the edge.
 *
 * measure: the vertical axis. dense: the best AdamW, or null. staircase: draw the Pareto front.
 * ringed: ring the best trade-off. bars: draw deviations.
 */
function scatter(host, points, { measure, label, dense, staircase, ringed, bars, name }) {
  if (!points.length) {
    host.replaceChildren(h("p", { class: "empty" }, "All runs are hidden: enable a method or a p."));
    return 0;
  }
  const narrow = host.clientWidth < 480;
  const box = frame(host, { height: narrow ? 320 : 420, left: 58, name });
  const { svg, x0, x1, y0, y1 } = box;
  const axis = view.axis;

  const outside = new Set(view.crop ? cropped(points) : []);
  const inside = points.filter((point) => !outside.has(point));
  const xEnd = Math.max(onAxis(axis, 0.9), ...inside.map((point) => onAxis(axis, point.sparsity)));
  const heights = inside.flatMap((point) => {
    const spread = bars && point.deviation ? point.deviation : 0;
    return [point[measure] - spread, point[measure] + spread];
  });
  if (dense) heights.push(dense[measure]);
  const domain = padded(heights, 1);
  const xScale = linear([-0.025 * xEnd, 1.03 * xEnd], [x0, x1]);
  const y = linear(domain, [y0, y1]);
  // Cropped points are drawn at the edge.
  const x = (value) => Math.min(xScale(value), x1 - SIZE);
  const place = (point) => [x(onAxis(axis, point.sparsity)), Math.min(y(point[measure]), y0 - SIZE)];

  drawAxes(
    box,
    ZERO_TICKS[axis].map((t) => ({ at: xScale(onAxis(axis, t / 100)), label: String(t) }))
      .filter(({ at }) => at <= x1 + 1),
    niceTicks(...domain, narrow ? 5 : 8).map((t) => ({ at: y(t), label: significant(t) })),
    axis === "log" && !narrow ? "weights that are zero, %  (logarithmic in the non-zero weights)"
      : "weights that are zero, %",
    label,
  );

  const clip = `${host.id}-clip`;
  svg.append(s("clipPath", { id: clip }, s("rect", { x: x0, y: y1 - 8, width: x1 - x0, height: y0 - y1 + 8 })));
  const layer = s("g", { "clip-path": `url(#${clip})` });
  svg.append(layer);
  if (dense) layer.append(s("line", { class: "reference", x1: x0, x2: x1, y1: y(dense[measure]), y2: y(dense[measure]) }));
  const best = paretoFront(points);
  if (staircase && best.length) {
    // At each sparsity, the best accuracy of all points that are at least that sparse.
    let path = `M${x0} ${y(best[0].accuracy)}`;
    for (const point of best) path += `V${y(point.accuracy)}H${x(onAxis(axis, point.sparsity))}`;
    layer.append(s("path", { class: "front-line", d: path }));
  }

  const onFront = new Set(best);
  // Draw the front on top, below it AdamW, below it the others.
  const rank = (point) => 2 * onFront.has(point) + (view.experiment.methods[point.method].name === "adamw");
  const ordered = [...points].sort((a, b) => rank(a) - rank(b));
  const marks = ordered.map((point) => {
    const [px, py] = place(point);
    const tint = { "--c": colour(pointColour(point)) };
    if (bars && point.deviation && !outside.has(point)) {
      layer.append(s("line", {
        class: "spread", style: tint, x1: px, x2: px,
        y1: y(point[measure] - point.deviation), y2: y(point[measure] + point.deviation),
      }));
    }
    const classes = ["mark", onFront.has(point) && "front", !point.reliable && "unreliable",
      outside.has(point) && "outside"];
    const node = s("path", {
      class: classes.filter(Boolean).join(" "), d: view.experiment.methods[point.method].marker,
      transform: `translate(${px.toFixed(2)} ${py.toFixed(2)}) scale(${SIZE})`, style: tint,
      "data-point": point.index,
    });
    layer.append(node);
    return { x: px, y: py, node, point, tip: () => tipOf(point), choose: () => choosePoint(point) };
  });

  const ring = (at, kind, radius) => s("circle", { class: kind, cx: at.x, cy: at.y, r: radius });
  const top = ringed && bestTradeoff(points);
  if (top) layer.append(ring(marks.find((mark) => mark.point === top), "ring", 11));
  if (dense) {
    const text = `best AdamW ${dense[measure].toFixed(2)}`;
    svg.insertBefore(s("text", { class: "reference-label", ...quietPlace(box, marks, y(dense[measure]), text) }, text), layer);
  }
  interactive(svg, marks);
  highlights.push((run) => {
    for (const old of layer.querySelectorAll(".chosen")) old.remove();
    const mark = marks.find(({ point }) => point.runs.includes(run));
    if (mark) layer.append(ring(mark, "chosen", 9));
  });
  return outside.size;
}
