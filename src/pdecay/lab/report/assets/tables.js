// Tables: accuracy at sparsity levels, all settings, and diverged runs.

/**
 * Draw the most accurate setting of each method at each sparsity level. Settings are chosen on the
 * validation split; the number is measured on the test split if all runs have it.
 */
function drawLevels(host, points) {
  const { experiment } = view;
  const measure = experiment.hasTest ? "test_accuracy" : "accuracy";
  const rows = [];
  experiment.methods.forEach((method, index) => {
    const own = points.filter((point) => point.method === index);
    if (!own.length) return;
    rows.push({ name: method.name, points: own, part: false });
    const pRanges = [...new Set(own.map(({ pRange }) => pRange))].filter((pRange) => pRange !== null).sort((a, b) => a - b);
    if (pRanges.length < 2) return;
    for (const pRange of pRanges) {
      rows.push({ name: `p = ${experiment.pRanges[pRange].label}`, points: own.filter((point) => point.pRange === pRange), part: true });
    }
  });
  const cells = rows.map((row) => DATA.levels.map((level) => atSparsity(row.points, level)));
  const tops = DATA.levels.map((_, column) => Math.max(
    ...cells.filter((_, place) => !rows[place].part).map((row) => row[column])
      .map((point) => (point && !point.collapsed ? point[measure] : -Infinity))));
  host.replaceChildren(h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "sparsity ≥"),
      h("th", { scope: "col" }, "settings"),
      ...DATA.levels.map((level) => h("th", { scope: "col" }, `${100 * level} %`)))),
    h("tbody", {}, ...rows.map((row, place) => h("tr", { class: row.part ? "part" : null },
      h("th", { scope: "row" }, row.name),
      h("td", { class: "count" }, String(row.points.length)),
      ...cells[place].map((point, column) =>
        levelCell(point, measure, point && !point.collapsed && point[measure] === tops[column])))))));
}

function levelCell(point, measure, isBest) {
  if (!point) return h("td", {}, "–");
  const button = h("button", { type: "button", on: {
    click: () => choosePoint(point),
    mouseenter: () => showTip(middle(button), ...tipOf(point)),
    mouseleave: hideTip,
    focus: () => button.matches(":focus-visible") && showTip(middle(button), ...tipOf(point)),
    blur: hideTip,
  } }, point[measure].toFixed(2));
  const value = point[measure.replace("accuracy", "deviation")];
  const deviation = value === null ? null : h("span", { class: "deviation" }, `±${value.toFixed(2)}`);
  return h("td", { class: point.collapsed ? "collapsed" : isBest ? "best" : null }, button, deviation);
}

const COLUMNS = [
  ["setting", (point) => point.name, (point) => point.name],
  ["validation accuracy, %", (point) => point.accuracy, (point) => accuracyText(point).replace(" %", "")],
  ["sparsity, %", (point) => point.sparsity, (point) => (100 * point.sparsity).toFixed(2)],
  ["trade-off", (point) => point.tradeoff, (point) => point.tradeoff.toFixed(2)],
  ["seeds", (point) => point.runs.length, (point) => String(point.runs.length)],
];

function drawSettings(host, points) {
  const { by, down } = view.order;
  const value = COLUMNS[by][1];
  const sign = down ? -1 : 1;
  const ordered = [...points].sort((a, b) => {
    const [one, other] = [value(a), value(b)];
    return sign * (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other);
  });
  const heads = COLUMNS.map(([name], column) => h("th", {
    scope: "col", "aria-sort": column !== by ? null : down ? "descending" : "ascending",
  }, h("button", { type: "button", on: { click: () => {
    view.order = { by: column, down: column === by ? !down : column > 0 };
    drawSettings(host, points);
  } } }, name)));
  host.replaceChildren(h("table", {},
    h("thead", {}, h("tr", {}, ...heads)),
    h("tbody", {}, ...ordered.map((point) => h("tr", {},
      h("td", { class: "words" }, h("button", { type: "button", on: { click: () => choosePoint(point) } }, noBreak(point.name))),
      ...COLUMNS.slice(1).map(([, , text]) => h("td", {}, text(point))))))));
}

function drawDiverged(runs) {
  $("diverged").hidden = !runs.length;
  $("diverged-list").replaceChildren(h("table", {},
    h("thead", {}, h("tr", {}, ...["setting", "seed", "after step"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...runs.map((run) => h("tr", {},
      h("td", { class: "words" }, noBreak(run.name)), h("td", {}, String(run.seed)),
      h("td", {}, run.step === null ? "–" : grouped(run.step)))))));
}
