"""What it costs: measures, whole models, loading, commands, beside the textbook way, the model's own forward pass and TransformerLens.

    parts.py     what can be measured (a `Part`, in a process of its own) and what comes of it (`Line`s of a table)
    store.py     the table on disk, from which an interrupted benchmark goes on
    running.py   parts one after the other, and what they will cost
    layer.py, textbook.py, models.py, commands.py      how each kind of part is measured            cost.py      one call
    bars.py, page.py                                   what is to be kept, tables and figure

Knows everything below the commands; prints nothing.
"""
