// What is chosen on one side is chosen on the others. A side tells "chosen" by its `events`, says what by `chosen()`, and takes it by
// `follow(chosen)`.
//
// Sides follow in turn, to what is chosen when their turn comes. A side that follows tells nothing: else two sides may swap for ever.

// Resolves when all sides show what the first has chosen. `signal` ends the link.
export function link(sides, signal) {
  const turns = new Map(sides.map((side) => [side, { waiting: 0, last: Promise.resolve() }]));
  const follow = (side, leader) => {
    const turn = turns.get(side);
    turn.waiting += 1;
    turn.last = turn.last.then(() => side.follow(leader.chosen())).finally(() => { turn.waiting -= 1; });
    return turn.last;
  };
  for (const side of sides) {
    const told = () => {
      if (!turns.get(side).waiting) sides.filter((other) => other !== side).forEach((other) => follow(other, side));
    };
    side.events.addEventListener("chosen", told, { signal });
  }
  return Promise.all(sides.slice(1).map((other) => follow(other, sides[0])));
}
