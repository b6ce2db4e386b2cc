"""English words for needles' keys and values ("adjective-noun") and for synthetic tasks. A list of our own."""

_NOUNS = """
apple bridge candle desert engine forest garden harbor island jacket kettle ladder market needle orange
pencil quarry ribbon saddle temple urchin valley window yogurt zipper anchor basket castle dragon eagle
feather guitar hammer insect jungle kitten lantern mirror napkin otter pillow quilt rocket shovel tunnel
umbrella violin walnut acorn badger cactus daisy easel falcon glacier helmet iguana jewel koala lemon magnet
nectar oyster parrot quiver raven sparrow turtle uniform velvet whistle almond beetle canyon dolphin ember
fiddle goblet hazel icicle jasmine kernel lizard meadow notebook olive puddle quartz river scarf trumpet
upland vessel willow yarn zebra archer bakery cabin dagger elbow flute grape hinge ivory jigsaw kayak lagoon
mango nutmeg opal pepper rabbit sailor tulip vinegar wagon barrel coral drum engraving fountain granite
hedge inlet jar kingdom leaf marble nest orchard planet raisin statue thimble vine wheel avenue blanket
cloud door envelope fence glove hill ink jug knot lamp moss nail oven plank rope sponge thread urn vase
wallet bucket chimney dune echo ferry gate hive iris
"""
NOUNS = tuple(_NOUNS.split())

_ADJECTIVES = """
amber brave calm dainty eager faint gentle humble icy jolly keen lively mellow noble odd plain quiet rapid
silent tidy urban vivid warm young zesty ancient bitter clever distant elegant famous glossy hollow ideal
joyful kind lonely modest narrow open polite quick rough steady tender useful vast weary agile bright crisp
dusty early fluffy graceful hidden innocent jagged knotty loyal misty neat ornate proud quaint rustic smooth
tall uneven velvety witty abrupt bold curious daring exact fierce golden honest immense jaunty large merry
nimble oval pale rare shiny tiny upbeat valid windy alert blunt cheerful dense empty frosty grand hasty idle
juicy lucky mild new obedient patient ready salty thick unique violet wild azure brisk cozy dim even fresh
grim heavy
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
