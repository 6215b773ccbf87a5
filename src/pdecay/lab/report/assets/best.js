// What is best among the points that are shown: the rules of best.py, which the tests hold
// together with these.

/** The points that no other beats in both sparsity and accuracy, from dense to sparse. */
function front(points) {
  const ordered = [...points].sort((a, b) => b.sparsity - a.sparsity || b.accuracy - a.accuracy);
  const kept = [];
  let highest = -Infinity;
  for (const point of ordered) {
    if (point.reliable && point.accuracy > highest) {
      kept.push(point);
      highest = point.accuracy;
    }
  }
  return kept.reverse();
}

/** The first of the greatest points, by two measures, or null. */
function greatest(points, first, second) {
  const reliable = points.filter((point) => point.reliable);
  return reliable.reduce(
    (top, point) =>
      top === null || point[first] > top[first] ||
      (point[first] === top[first] && point[second] > top[second]) ? point : top,
    null,
  );
}

/** The most accurate point that is at least so sparse, or null. */
const above = (points, level) =>
  greatest(points.filter((point) => point.sparsity >= level - DATA.rounding), "accuracy", "sparsity");

/** The point with the best trade-off, or null. */
const balanced = (points) => greatest(points, "tradeoff", "sparsity");

/** The points that are so bad that a plot which shows them would show nothing else. */
function collapsed(points) {
  const accuracies = points.map((point) => point.accuracy).sort((a, b) => a - b);
  const highest = accuracies.at(-1);
  const median = accuracies[Math.floor((accuracies.length - 1) / 2)];
  const floor = highest - Math.max(DATA.reach * (highest - median), 1);
  return points.filter((point) => point.accuracy < floor);
}
