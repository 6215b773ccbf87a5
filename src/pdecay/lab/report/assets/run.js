// Details of one run: settings, training curves and layers.

function drawRun(index) {
  const { experiment } = view;
  const run = experiment.runs[index];
  $("run").hidden = !run;
  if (!run) return;
  const point = experiment.points.means.find(({ runs }) => runs.includes(index));
  $("run-name").replaceChildren(noBreak(point.name));
  $("seeds").replaceChildren();
  if (point.runs.length > 1) {
    $("seeds").append("Seed", ...point.runs.map((other) => h("button", {
      type: "button", class: "chip", "aria-pressed": String(other === index),
      on: { click: () => chooseRun(other) },
    }, String(experiment.runs[other].seed))));
  }
  const facts = [
    ...run.settings,
    ["validation accuracy", `${run.accuracy.toFixed(2)} %`],
    ["test accuracy", run.test_accuracy === null ? "" : `${run.test_accuracy.toFixed(2)} %`],
    ["sparsity", percent(run.sparsity)],
    ["loss", run.loss === null ? "" : significant(run.loss)],
    ["trade-off", run.tradeoff.toFixed(2)],
    ["time", duration(run.seconds)],
    ["id", run.id],
  ].filter(([, value]) => value !== "");
  $("run-facts").replaceChildren(...facts.map(([name, value]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  drawCurves(run, point);
  drawLayers(run);
}

function duration(seconds) {
  if (seconds === null) return "";
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 5400 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function drawCurves(run, point) {
  const { experiment } = view;
  const denseRun = experiment.dense.means === null
    ? null : experiment.runs[experiment.points.means[experiment.dense.means].runs[0]];
  const others = point.runs.map((index) => experiment.runs[index]).filter((other) => other !== run);
  const dense = denseRun === run || others.includes(denseRun) ? null : denseRun;
  const lines = (name) => [
    dense && { kind: "dense", name: "best AdamW", of: dense, values: dense.curve[name] },
    ...others.map((other) => ({ kind: "other", name: `seed ${other.seed}`, of: other, values: other.curve[name] })),
    { kind: "", name: "this run", of: run, values: run.curve[name] },
  ].filter(Boolean);
  const notes = ["Solid: this run", dense && "dashed: the best AdamW", others.length && "thin: its other seeds",
    "dotted: training loss"];
  $("curves-note").replaceChildren(`${notes.filter(Boolean).join("; ")}.`);
  const host = $("curves");
  host.replaceChildren();
  const training = { kind: "train", name: "training", of: run, values: run.curve.train_loss };
  const panels = [
    ["validation accuracy, %", lines("accuracy"), (value) => `${value.toFixed(2)} %`, 1],
    ["loss", [...lines("loss"), training], (value) => value.toFixed(3), 0.01],
    ["weights that are zero, %", lines("sparsity").map((line) => ({
      ...line, values: line.values.map((value) => (value === null ? null : 100 * value)),
    })), (value) => `${value.toFixed(2)} %`, 1],
  ];
  for (const [label, drawn, format, least] of panels) {
    const panel = h("div", { class: "panel" }, h("h4", {}, label));
    const plot = h("div", {});
    panel.append(plot);
    host.append(panel);
    drawCurve(plot, label, drawn, format, least);
  }
}

function drawCurve(host, label, lines, format, least) {
  const known = lines.flatMap(({ values }) => values.filter((value) => value !== null));
  if (!known.length) {
    host.replaceChildren(h("p", {}, "Not measured."));
    return;
  }
  const box = frame(host, { height: 210, left: 44, right: 22, name: `Training: ${label}` });
  const { svg, x0, x1, y0, y1 } = box;
  const last = Math.max(...lines.flatMap(({ of }) => of.curve.step), 1);
  const x = linear([0, last], [x0, x1]);
  const domain = padded(known, least);
  const y = linear(domain, [y0, y1]);
  drawAxes(
    box,
    niceTicks(0, last, 4).map((t) => ({ at: x(t), label: grouped(t) })),
    niceTicks(...domain, 5).map((t) => ({ at: y(t), label: significant(t) })),
    "step",
  );
  for (const { kind, of, values } of lines) {
    let path = "";
    values.forEach((value, place) => {
      // Start a new line after a missing value.
      const joined = place > 0 && values[place - 1] !== null;
      if (value !== null) path += `${joined ? "L" : "M"}${x(of.curve.step[place]).toFixed(1)} ${y(value).toFixed(1)}`;
    });
    svg.append(s("path", { class: `line ${kind}`, d: path }));
  }

  // A vertical line at the step nearest to the pointer, or moved by the arrow keys, with its values.
  const hair = s("line", { class: "hair", y1: y0, y2: y1, visibility: "hidden" });
  svg.append(hair);
  const { step } = lines.find(({ kind }) => kind === "").of.curve;
  const read = (place) => {
    hair.setAttribute("x1", x(step[place]));
    hair.setAttribute("x2", x(step[place]));
    hair.setAttribute("visibility", "visible");
    const rows = lines.flatMap(({ name, of, values }) => {
      const at = of.curve.step.indexOf(step[place]);
      return at < 0 || values[at] === null ? [] : [[name, format(values[at])]];
    });
    showTip(middle(hair), `step ${grouped(step[place])}`, rows);
  };
  const leave = () => {
    hair.setAttribute("visibility", "hidden");
    hideTip();
  };
  let place = step.length - 1;
  svg.addEventListener("pointermove", (event) => {
    const bounds = svg.getBoundingClientRect();
    const at = ((event.clientX - bounds.left) * box.width) / bounds.width;
    place = step.reduce((best, value, k) => (Math.abs(x(value) - at) < Math.abs(x(step[best]) - at) ? k : best), 0);
    read(place);
  });
  svg.addEventListener("pointerleave", leave);
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("focus", () => {
    if (svg.matches(":focus-visible")) read(place);
  });
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    place = Math.max(0, Math.min(step.length - 1, place + move));
    read(place);
    event.preventDefault();
  });
}

function drawLayers(run) {
  const table = view.experiment.layerTables[run.layers.table];
  const rows = table.map(([name, shape, size], place) => {
    const left = size - run.layers.zeros[place];
    return { name, shape, size, left, share: size ? left / size : 0 };
  });
  const host = $("layers");
  if (!rows.length) {
    host.replaceChildren(h("p", { class: "empty" }, "The record contains no layers."));
    return;
  }
  const longest = Math.max(...rows.map(({ share }) => share), 1e-6);
  const end = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1].find((t) => longest <= t * 1.0001);
  const longestName = Math.max(...rows.map(({ name }) => name.length));
  host.style.setProperty("--names", `${Math.min(longestName, 40) + 1}ch`);
  host.replaceChildren(
    h("div", { class: "layer" }, h("div", { class: "ends" },
      h("span", {}, "0"), h("span", {}, `${significant(100 * end)} %`))),
    ...rows.map(({ name, shape, size, left, share }) => h("div", { class: "layer", title: shape },
      h("span", { class: "layer-name" }, name),
      h("div", { class: "track" }, h("div", { class: "fill", style: { width: `${(100 * share) / end}%` } })),
      h("b", {}, `${(100 * share).toFixed(2)} %`),
      h("span", { class: "count" }, `${grouped(left)} of ${grouped(size)}`))),
  );
}
