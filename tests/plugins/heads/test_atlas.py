"""The atlas: names that hand-built heads must get and random ones must not, what other groups add,
files, comparison, page.
"""

import json
from contextlib import ExitStack

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from chromium import Browser, executable
from hand_built import hand_built
from numpy.testing import assert_allclose
from refusals import refused

import repo_interp as ri
from repo_interp.analysis.publication import NO_PARQUET, claim_results, write_table
from repo_interp.experiments import Atlas
from repo_interp.models.decoder import as_decoder
from repo_interp.models.fresh_weights import fresh_twin
from repo_interp.plots.pages.report import write_report
from repo_interp.plots.view_catalogue import tables
from repo_interp.plugins.head_tables.head_columns import add_columns
from repo_interp.plugins.head_tables.overview import clustered, standardised
from repo_interp.plugins.heads import atlas as atlas_experiment
from repo_interp.plugins.heads.head_names import RULES, Rule, name_heads, null_of
from repo_interp.plugins.heads.view import VIEW, atlas_data
from repo_interp.storage.store import Damaged
from repo_interp.tasks import make_task

TASK = make_task("reversal")
PROMPTS = TASK.prompts(3, test_set="20")
FEW = Atlas(twins=3, sequences=3)


def tree_of(**groups):
    return xr.DataTree.from_dict({f"/{name}": group for name, group in groups.items()})


def names(run):
    return [
        [set(filter(None, str(of).split(", "))) for of in row]
        for row in run["atlas"]["name"].values
    ]


# ---- names ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_hand():
    """Heads built by hand; in the last layer positions that are constant, the index, a mirror, and
    a jumble.
    """
    bridge = hand_built(TASK.vocabulary_size, TASK.training_length)
    tokens, first = len(PROMPTS[0].tokens), 5
    walk = np.arange(float(tokens))
    walk[first + 21 :] = walk[PROMPTS[0].attributes["source"]]
    jumble = np.random.default_rng(0).normal(0, 5, tokens)
    with ExitStack() as positions:
        for head, values in ((1, np.arange(tokens)), (2, walk), (3, jumble)):
            # Repeated random tokens are no longer than the prompts: their positions are those of a
            # prompt's first tokens.
            put = lambda z, values=values: z * 0 + z.new_tensor(values[: z.shape[-1]])  # noqa: E731
            positions.enter_context(ri.set_positions(bridge, 2, head, put))
        return ri.analyze(bridge, [*PROMPTS], ("attention_mass",), experiments=[FEW])


def test_heads_built_by_hand_get_their_names_and_no_others(by_hand):
    found = names(by_hand)
    assert found[0] == [{"previous token"}, set(), set(), set()]
    of_tokens = [{"induction"}, {"duplicate token"}, {"sink"}, set()]
    assert [of - {"semantic"} for of in found[1]] == of_tokens
    of_positions = {"constant", "mono", "mirror"}
    constant, mono, mirror, jumble = (of & of_positions for of in found[2])
    assert (constant, mono, jumble) == ({"constant"}, {"mono"}, set())
    assert mirror - {"mono"} == {"mirror"}
    atlas = by_hand["atlas"]
    for name, layer, head, least in (
        ("previous_token", 0, 0, 0.9),
        ("induction", 1, 0, 0.9),
        ("sink", 1, 2, 0.95),
        ("constant", 2, 0, 1),
        ("mono", 2, 1, 1),
        ("mirror", 2, 2, 1 - 1e-6),
    ):
        assert atlas[name][layer, head] >= least
    assert np.isnan(atlas["position_range"][1]).all() and (atlas["heads_per_map"][2] == 1).all()


def test_a_model_with_random_weights_gets_no_name():
    twin = ri.bridge(fresh_twin(as_decoder(ri.zoo("reversal/repo")), seed=1000))
    run = ri.analyze(twin, PROMPTS[:1], (), experiments=[Atlas(twins=10, sequences=1)])
    assert not any(of for row in names(run) for of in row)
    assert np.isfinite(run["atlas"]["null"]).any("label").all()
    assert (run["atlas"]["threshold"] > 0)[5:].all()


def test_the_first_of_random_tokens_is_the_models_and_not_the_number_of_prompts():
    small = Atlas(twins=0, sequences=1, prompts=2, scores=("induction", "sink"))

    def atlas(bridge, prompts):
        return ri.analyze(bridge, prompts, (), experiments=[small])["atlas"].to_dataset()

    bridge = hand_built(TASK.vocabulary_size, TASK.training_length)  # its configuration names <bos>
    plain = [prompt.tokens for prompt in PROMPTS]
    one, two = (atlas(bridge, plain[:count]) for count in (1, 2))
    assert one.attrs["first_token"] == 1 and float(one["sink"][1, 2]) > 0.95
    xr.testing.assert_equal(one, two)
    words = [tokens[1:] for tokens in plain[:2]]  # both begin with the same word
    assert "first_token" not in atlas(bridge, words).attrs
    # its tokenizer puts <bos>, which no prompt need have; its configuration names none
    reads = ri.zoo("reversal/repo")
    assert atlas(reads, words).attrs["first_token"] == 1
    unread = ri.bridge(fresh_twin(as_decoder(reads), seed=0))
    assert atlas(unread, PROMPTS[:1]).attrs["first_token"] == 1, "prompts say so themselves"


def null_of_reversal(**options):
    scores = ("induction", "retrieval")
    few = Atlas(sequences=1, prompts=1, scores=scores, **{"twins": 2} | options)
    return ri.analyze(ri.zoo("reversal/rope"), PROMPTS, (), experiments=[few])["atlas"].to_dataset()


def test_twins_are_drawn_once_and_what_is_kept_is_what_was_drawn(monkeypatch, tmp_path):
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path))
    drawn = null_of_reversal()
    files = sorted((tmp_path / "twins").iterdir())
    assert len(files) == 4, "of two twins those on random tokens, and those on prompts"
    with monkeypatch.context() as patch:
        patch.setattr(atlas_experiment, "fresh_twin", lambda *_: pytest.fail("drawn again"))
        xr.testing.assert_identical(null_of_reversal(), drawn)
        null_of_reversal(twins=1)  # the first of two
        with pytest.raises(pytest.fail.Exception):
            null_of_reversal(seed=5)
    content = files[0].read_bytes()
    for damaged in (content.replace(b"0", b"1", 1), b"{}", b"[" * 100_000):
        files[0].write_bytes(damaged)
        with pytest.warns(Damaged, match=r"\.json is damaged: .* measured again$"):
            xr.testing.assert_identical(null_of_reversal(), drawn)
        assert files[0].read_bytes() == content
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path / "file"))
    xr.testing.assert_identical(null_of_reversal(), drawn)  # nothing can be kept there


def test_twins_can_be_declined_and_scores_chosen(run, monkeypatch):
    monkeypatch.setattr(atlas_experiment, "fresh_twin", lambda *_: pytest.fail("drawn"))

    def scored(model, prompts, *scores):
        asked = Atlas(twins=0, sequences=4, scores=scores)
        return ri.analyze(ri.zoo(model), prompts, (), experiments=[asked])

    asked = ["retrieval", "source_mass", "induction"]
    some = scored("reversal/repo", TASK.prompts(2), *asked)
    atlas, whole = some["atlas"].to_dataset(), run["atlas"].to_dataset()
    assert {*asked} == {*atlas.data_vars} - {"name", "named", "null", "threshold"}
    assert atlas.sizes["twin"] == 0
    xr.testing.assert_equal(atlas[asked], whole[asked])
    at_least = [rule.at_least if rule.score in asked else np.nan for rule in RULES]
    np.testing.assert_array_equal(atlas["threshold"], at_least)
    assert {"retrieval", "needle"} <= names(some)[2][1]
    (finding,) = (one for one in ri.findings(some) if one.variable == "retrieval")
    assert "no models with random weights were asked for" in finding.evidence
    assert "retrieval" in ri.atlas(some) and "distance" not in ri.atlas(some)
    with refused("retrieval are of answers, and no prompt marks a generated token and its source"):
        scored("reversal/repo", [[5, 6, 7]], "retrieval")
    with refused("no layer of this model has mirror on these prompts"):
        scored("reversal/nope", TASK.prompts(1), "mirror")


def test_a_name_needs_its_score_beyond_twins_and_large_and_the_others_within_limits():
    scores = {"one": np.array([[0.1, 0.3, 0.6, np.nan]]), "other": np.array([[0.0, 1.0, 1.0, 1.0]])}
    fixed = np.array([False])
    rule, missing = Rule("a", "", "one", 0.2, {"other": (0.5, 1.0)}), Rule("c", "", "missing", 0.0)
    learned = Rule("b", "", "one", 0.0, learned=True)
    assert rule.holds(scores, fixed, np.nan).tolist() == [[False, True, True, False]]
    assert rule.holds(scores, fixed, 0.5).tolist() == [[False, False, True, False]]
    assert not learned.holds(scores, fixed, np.nan).any()
    assert not missing.holds(scores, fixed, np.nan).any()
    largest = [each.largest(scores, fixed) for each in (rule, learned)]
    np.testing.assert_array_equal(largest, [0.6, np.nan])
    assert [*name_heads(scores, fixed, {"a": 0.5, "b": 0.0}, (rule, learned))] == ["a", "b"]
    assert null_of(np.array([0.1, 0.4, np.nan, 0.2]), 0.95) == pytest.approx(0.5)
    assert np.isnan(null_of(np.array([np.nan]), 0.95))
    assert rule.words == "one above 0.2, other from 0.5 to 1"


# ---- a zoo model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    """With everything that the atlas takes from other groups."""
    measures = ["positions", "attention_mass", "components"]
    measures += ["three_axis", "fake_distance", "rotation"]
    experiments = [Atlas(sequences=4, twins=3)]
    return ri.analyze(ri.zoo("reversal/repo"), TASK.prompts(2), measures, experiments=experiments)


def test_the_mirror_heads_of_the_reversal_model_are_found(run):
    assert all({"mirror", "needle", "retrieval"} <= of for of in names(run)[2])
    assert not any("mirror" in of for row in (0, 1, 3) for of in names(run)[row])
    assert run["atlas"].attrs["twins"] == run["atlas"].sizes["twin"] == 3


def test_the_group_has_what_other_groups_hold_of_heads(run):
    atlas = run["atlas"].to_dataset()
    # The position range is the atlas's own, and what the measure finds on the same prompts
    for name, group, variable in (
        ("mass", "attention_mass", "mass"),
        ("three_axis_r", "three_axis", "r"),
        ("fake_distance_r", "fake_distance", "r"),
        ("position_range", "positions", "position_range"),
    ):
        found = run[group][variable].mean("prompt").transpose(*atlas[name].dims)
        assert_allclose(atlas[name], found, rtol=1e-5)
    assert (atlas["slow_pairs"] == (run["rotation"]["slow_dominating"] == 1).sum("component")).all()
    by_band = run["components"]["vaf_band"].mean("prompt")
    assert (atlas["band"] == by_band.idxmax("band")).all()


def test_the_table_has_a_row_per_head_and_only_columns_that_the_run_has(run):
    table = ri.atlas(run)
    assert list(table.columns[:4]) == ["layer", "head", "scheme", "name"] and len(table) == 16
    assert {"mirror", "mass[words]", "band", "three_axis_r", "slow_pairs"} <= {*table.columns}
    left_out = ("named", "null", "effect", "reads")
    assert not any(column.startswith(left_out) for column in table.columns)
    assert table.notna().any().all(), "a column of NaN stands for something that the run lacks"
    head = table.set_index(["layer", "head"]).loc[2, 1]
    assert head["mirror"] == run["atlas"]["mirror"].sel(layer=2, head=1)
    without = ri.atlas(tree_of(attention_mass=run["attention_mass"].to_dataset()))
    assert list(without.columns[:3]) == ["layer", "head", "scheme"] and "mass[words]" in without
    with refused("--experiments atlas"):
        ri.atlas(tree_of(scores=xr.Dataset({"mean_score": ("test_set", [1.0])})))


def test_what_f_phi_reads_and_effects_of_interventions_become_columns(run):
    def made_up(layers, **coordinates):
        shape = (len(layers), 4, 2)
        heads = {"layer": layers, "head": range(4)}
        values, attributes = np.arange(8.0 * len(layers)), {"long_name": "made up", "units": "1"}
        return xr.DataArray(
            values.reshape(shape), heads | coordinates, [*heads, *coordinates], attrs=attributes
        )

    shares = made_up(range(4), source=["token", "index"])
    effect = made_up([0, 2], kind=["linearised", "frozen"])
    groups = {name: node.to_dataset() for name, node in run.children.items()}
    groups |= {
        "position_sources": xr.Dataset({"share": shares}),
        "effects": xr.Dataset({"effect": effect.expand_dims("prompt")}),
    }
    table = ri.atlas(tree_of(**groups))
    assert table["reads[token]"].tolist() == [*range(0, 32, 2)]
    missing = [np.nan] * 4
    expected = [1, 3, 5, 7, *missing, 9, 11, 13, 15, *missing]
    np.testing.assert_array_equal(table["effect[frozen]"], expected)
    assert add_columns({}).sizes == {}


def test_csv_and_parquet_hold_the_table(run, tmp_path, monkeypatch):
    table = pd.DataFrame(ri.atlas(run))
    text, parquet = write_table(ri.atlas(run), tmp_path, "atlas")[0]
    pd.testing.assert_frame_equal(pd.read_parquet(parquet), table)
    from_text = pd.read_csv(text, keep_default_na=False, na_values=[""]).fillna({"name": ""})
    pd.testing.assert_frame_equal(from_text, table, check_dtype=False)
    parquet.unlink()

    def missing(*arguments, **options):
        raise ImportError("no pyarrow")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", missing)
    assert write_table(ri.atlas(run), tmp_path, "atlas") == (
        [text],
        [NO_PARQUET.format(name="atlas")],
    )
    assert [*tmp_path.iterdir()] == [text]


def test_files_say_what_the_heads_were_measured_on(run, tmp_path):
    table, group = ri.atlas(run), run["atlas"].sel(label="retrieval")
    table.to_json(tmp_path / "atlas.json")
    table.to_parquet(tmp_path / "atlas.parquet")
    read = json.loads((tmp_path / "atlas.json").read_text())
    for attributes in (read["attrs"], pd.read_parquet(tmp_path / "atlas.parquet").attrs):
        for name in ("checkpoint_digest", "dtype", "prompts_digest", "prompts"):
            assert attributes[name] == run.attrs[name]
        assert attributes["twins"] == 3
        assert attributes["names"]["retrieval"] == {
            "rule": "retrieval above 0.1",
            "nulls": group["null"].values.tolist(),
            "threshold": float(group["threshold"]),
        }
    assert read["heads"] == json.loads(table.to_json(orient="records"))


def test_other_libraries_read_the_retrieval_scores(run, tmp_path):
    """As kvpress 0.5.5 and Retrieval_Head read their files: numpy.loadtxt and a clip; the mean of
    each list.
    """
    table = ri.atlas(run)
    scores = run["atlas"]["retrieval"].transpose("layer", "head").fillna(0).values
    assert (scores > 0).any()

    def duo_attention(**options):
        path = table.to_duo_attention(tmp_path, **options)
        return np.clip(np.loadtxt(path, dtype=float, delimiter="\t"), 0, 1)

    assert duo_attention() == pytest.approx(scores, abs=1e-6)
    windows = {"sink_size": 128, "recent_size": 256}
    assert json.loads((tmp_path / "config.json").read_text()) == windows
    table.attrs["kv_heads"] = 2
    shared = scores.reshape(len(scores), 2, -1).max(-1)
    assert duo_attention(sink_size=4, recent_size=8) == pytest.approx(shared, abs=1e-6)
    heads = json.loads(table.to_retrieval_head(tmp_path / "heads.json").read_text())
    wanted = {f"{layer}-{head}": score for (layer, head), score in np.ndenumerate(scores)}
    assert {name: np.mean(own) for name, own in heads.items()} == pytest.approx(wanted)
    measured = run["fake_distance"]["semantic_share"].mean("prompt").transpose("layer", "head")
    shares = measured.values.reshape(len(scores), 2, -1).max(-1)
    assert duo_attention(score="semantic_share") == pytest.approx(shares, abs=1e-6)
    assert 0 < shares.min() < shares.max() < 1


def test_an_atlas_that_other_libraries_cannot_read_is_refused(run, tmp_path):
    table, out = ri.atlas(run), tmp_path / "part"
    lost = table.assign(retrieval=table["retrieval"].where(table.index != 5))
    without = ri.atlas(tree_of(attention_mass=run["attention_mass"].to_dataset()))
    for damaged, score, line in (
        (table[1:], "retrieval", "has 15 rows, and 1 heads have none .L0 H0."),
        (lost, "retrieval", "has 16 rows, and 1 heads have none .L1 H1."),
        (pd.concat([table, table[:1]]), "retrieval", "has 17 rows, and 0 heads have none"),
        (without, "mass[words]", "does not say how many heads the model has"),
        (table, "layer", "the atlas has no numbers 'layer'"),
    ):
        for write in (damaged.to_retrieval_head, damaged.to_duo_attention):
            with refused(line):
                write(out, score=score)
    with refused("sink_size is 1.5; wanted a whole number"):
        table.to_duo_attention(out, sink_size=1.5)
    assert not out.exists()


@pytest.mark.usefixtures("no_figures")
def test_results_with_a_table_can_be_replaced_and_lose_it(run, tmp_path):
    out = tmp_path / "out"
    plain = tree_of(patterns=run["attention_mass"].to_dataset())
    for tree, expected in ((run, 2), (plain, 0)):
        with claim_results(out, "x", overwrite=True) as claim:
            published = claim.publish(tree, lambda run, page, figures: [])
        assert len(published.tables) == expected == len(list(out.glob("atlas.*")))


def test_what_cannot_be_asked_is_refused():
    model = ri.zoo("reversal/nope").original_model
    asked, prompts = Atlas(prompts=2, sequences=5, twins=1), TASK.prompts(3, test_set="4")
    assert asked.plan(model, TASK, prompts, TASK.training_length).passes == (14, 14, *[45] * 5) * 2
    with refused("repeats random tokens"):
        asked.plan(model, TASK, prompts, 4)


# ---- comparison and page -------------------------------------------------------------------------


@pytest.mark.usefixtures("no_pictures")
def test_runs_are_lined_up_head_by_head_with_their_names(run, tmp_path):
    asked = Atlas(sequences=1, twins=0)
    rope = ri.analyze(ri.zoo("reversal/rope"), TASK.prompts(2), (), experiments=[asked])
    shown = ["name", "named", "induction"]
    compared = ri.compare([alone(run, shown), alone(rope, shown)])
    name, own = compared["atlas"]["name"], run["atlas"]["name"].values
    assert name.dims == ("run", "layer", "head")
    assert (name.sel(run="reversal/repo").values == own).all()
    (changed,) = (table for table in tables(compared) if table.title == "Heads whose name changes")
    assert len(changed.rows) == int((rope["atlas"]["name"].values != own).sum()) > 0
    by_head = {row[:2]: row[2:] for row in changed.rows}
    assert by_head[2, 1][0].startswith("mirror") and "mirror" not in by_head[2, 1][1]
    assert write_report(compared, tmp_path / "page.html", tmp_path / "figures") == []
    drawn = {file.stem for file in (tmp_path / "figures").iterdir()}
    assert drawn == {"atlas_names", "atlas_induction"}


def test_the_overview_clusters_standardised_columns(run):
    values, columns, heads = standardised(run["atlas"].to_dataset())
    assert values.shape == (16, len(columns)) and heads[5] == (1, 1)
    assert "mono" not in columns, "the same for all heads"
    assert values.mean(0) == pytest.approx(0, abs=1e-9) and values.std(0) == pytest.approx(1)
    order = [*clustered(values)[0]]
    assert sorted(order) == [*range(16)]
    places = [order.index(head) for head in range(8, 12)]
    assert max(places) - min(places) == 3, "the four mirror heads stand together"
    assert clustered(values[:2])[1] is None


def alone(run, variables):
    """Some of the group atlas of `run` by itself."""
    tree = tree_of(atlas=run["atlas"].to_dataset()[variables])
    tree.attrs = run.attrs
    return tree


def test_the_page_has_the_rules(run):
    assert atlas_data(run, None)[1] == (), "nothing is left out"
    (table,) = VIEW.tables(run)
    rows = {row[0]: row[1:] for row in table.rows}
    assert [*rows] == [rule.name for rule in RULES]
    assert rows["mirror"][0] == "gives a copy a position near its source's"
    assert rows["mirror"][1:4] == (4, "L2\u00a0H0, L2\u00a0H1, L2\u00a0H2, L2\u00a0H3", 0.5)
    assert "mirror: mirror above 0.5" in table.note


@pytest.mark.usefixtures("no_pictures")
def test_a_reader_sorts_and_filters_the_table_and_opens_a_head(run, tmp_path):
    path = executable()
    if path is None:
        pytest.skip("no Chromium")
    both = tree_of(**{name: run[name].to_dataset() for name in ("positions", "atlas")})
    ri.plots.report_page(both, tmp_path / "page.html")
    browser = Browser(tmp_path / "browser", path)
    table = "document.querySelector('.head-table %s')"

    def rows():
        cells = "[...document.querySelectorAll('.head-table tbody tr')].map((row) => row.cells[0])"
        return browser.run(f"{cells}.map((cell) => cell.textContent)")

    def choose(text):
        field = f"Object.assign({table % '.filter'}, {{value: {text!r}}})"
        browser.run(f"{field}.dispatchEvent(new Event('input'))")

    try:
        browser.open((tmp_path / "page.html").as_uri())
        browser.wait("'alive' in document.documentElement.dataset")
        assert rows() == [f"L{layer} H{head}" for layer in range(4) for head in range(4)]
        buttons = "[...document.querySelectorAll('.head-table thead button')]"
        distance = run["atlas"]["distance"].values.ravel()
        for order in (np.argsort(-distance, kind="stable"), np.argsort(distance, kind="stable")):
            browser.run(f"{buttons}.find((one) => one.textContent === 'distance').click()")
            assert rows() == [f"L{place // 4} H{place % 4}" for place in order]
        choose("mirror source_mass>0.5 h1")
        assert rows() == ["L2 H1"]
        assert browser.run(f"{table % 'output'}.textContent") == "1 of 16 heads"
        browser.run(f"{table % 'tbody tr'}.click()")
        chosen = "document.querySelector('.tile[aria-pressed=true]').dataset.head"
        assert browser.run(chosen) == "2.1"
        assert browser.run(f"{table % '[aria-current] :first-child'}.textContent") == "L2 H1"
        choose("nothing-is-called-this")
        assert rows() == [] and browser.errors == []
    finally:
        browser.close()
