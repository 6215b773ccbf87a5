// Selection rules for the points that the filters show; the same rules as in best.py.

/** The points that no other beats in sparsity and accuracy, from dense to sparse. */
function paretoFront(points) {
  const ordered = [...points].sort((a, b) => b.sparsity - a.sparsity || b.accuracy - a.accuracy);
  const found = [];
  let highest = -Infinity;
  for (const point of ordered) {
    if (point.recommended && point.accuracy > highest) {
      found.push(point);
      highest = point.accuracy;
    }
  }
  return found.reverse();
}

/** The first of the points that are greatest by two measures, or null. */
function greatest(points, first, second) {
  return points.reduce(
    (top, point) =>
      top === null || point[first] > top[first] ||
      (point[first] === top[first] && point[second] > top[second]) ? point : top,
    null,
  );
}

/** The most accurate point with at least this sparsity, or null. */
const atSparsity = (points, level) =>
  greatest(points.filter((point) => point.reliable && point.sparsity >= level - DATA.rounding), "accuracy", "sparsity");

/** The point with the best trade-off, or null. */
const bestTradeoff = (points) => greatest(points.filter((point) => point.recommended), "tradeoff", "sparsity");

/** The points so far below the others that a plot with them would be unreadable. */
function cropped(points) {
  const accuracies = points.map((point) => point.accuracy).sort((a, b) => a - b);
  const highest = accuracies.at(-1);
  const median = accuracies[Math.floor((accuracies.length - 1) / 2)];
  const floor = highest - Math.max(DATA.crop * (highest - median), 1);
  return points.filter((point) => point.accuracy < floor);
}
