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
from repo_interp.analysis import atlas as atlas_files
from repo_interp.analysis.atlas import NO_PARQUET, add_columns, write_atlas
from repo_interp.analysis.publication import claim_results
from repo_interp.experiments import Atlas
from repo_interp.experiments import atlas as atlas_experiment
from repo_interp.experiments.catalogue import planned
from repo_interp.experiments.head_names import RULES, Rule, name_heads, null_of
from repo_interp.models.load import fresh_twin
from repo_interp.plots.catalogue import tables
from repo_interp.plots.pages.report import write_report
from repo_interp.plots.views.atlas import VIEW, clustered, embed, standardised
from repo_interp.store import Damaged
from repo_interp.tasks import make_task

TASK = make_task("reversal")
PROMPTS = TASK.prompts(3, test_set="20")
FEW = Atlas(twins=10, sequences=3)


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
    constant, mono, mirror, jumble = found[2]
    assert "constant" in constant and not {"mono", "mirror"} & constant
    assert "mono" in mono and not {"constant", "mirror"} & mono
    assert "mirror" in mirror and "constant" not in mirror
    assert not {"constant", "mono", "mirror"} & jumble
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
    for name, task in (("reversal/repo", TASK), ("niah/repo", make_task("niah"))):
        twin = ri.bridge(fresh_twin(ri.zoo(name), seed=1000))
        run = ri.analyze(twin, task.prompts(1), (), experiments=[Atlas(twins=10, sequences=1)])
        assert not any(of for row in names(run) for of in row)
        assert np.isfinite(run["atlas"]["null"]).any("label").all()
        assert (run["atlas"]["threshold"] > 0)[5:].all()


def test_the_first_of_random_tokens_is_the_models_and_not_the_number_of_prompts():
    on_random = ["previous_token", "duplicate_token", "induction", "sink", "place_u"]
    small = Atlas(twins=1, sequences=1, prompts=2)

    def atlas(bridge, prompts):
        return ri.analyze(bridge, prompts, (), experiments=[small])["atlas"].to_dataset()

    bridge = hand_built(TASK.vocabulary_size, TASK.training_length)  # its configuration names <bos>
    one, two = (atlas(bridge, PROMPTS[:count]) for count in (1, 2))
    assert one.attrs["first_token"] == two.attrs["first_token"] == 1
    assert float(one["sink"][1, 2]) > 0.95
    xr.testing.assert_equal(one[on_random], two[on_random])
    words = [prompt.tokens[1:] for prompt in PROMPTS[:2]]  # both begin with the same word
    for count in (1, 2):
        assert "first_token" not in atlas(bridge, words[:count]).attrs
    # its tokenizer puts <bos>, which no prompt need have; its configuration names none
    reads = ri.zoo("reversal/repo")
    xr.testing.assert_equal(
        atlas(reads, words[:1])[on_random], atlas(reads, PROMPTS[:2])[on_random]
    )
    unread = ri.bridge(fresh_twin(reads, seed=0))
    assert atlas(unread, PROMPTS[:1]).attrs["first_token"] == 1, "prompts say so themselves"


def null_of_reversal(**options):
    few = Atlas(sequences=1, prompts=1, **{"twins": 2, **options})
    return ri.analyze(ri.zoo("reversal/rope"), PROMPTS, (), experiments=[few])["atlas"].to_dataset()


def test_twins_are_drawn_once_and_what_is_kept_is_what_was_drawn(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("REPO_INTERP_CACHE", str(tmp_path))
    drawn = null_of_reversal()
    files = sorted((tmp_path / "twins").iterdir())
    assert len(files) == 4, "of two twins those on random tokens, and those on prompts"
    with monkeypatch.context() as patch:
        patch.setattr(atlas_experiment, "fresh_twin", lambda *_: pytest.fail("drawn again"))
        xr.testing.assert_identical(null_of_reversal(), drawn)
        one = null_of_reversal(twins=1)["null"]
        assert np.isfinite(one.sel(label="induction")).all(), "one twin is the first of two"
        with pytest.raises(pytest.fail.Exception):
            null_of_reversal(seed=5)
    content = files[0].read_bytes()
    for damaged in (content[:-3], content.replace(b"0", b"1", 1), b"{}", b"[" * 100_000):
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

    prompts, asked = TASK.prompts(2), {"retrieval", "source_mass", "induction"}
    some = scored("reversal/repo", prompts, *asked)
    atlas, whole = some["atlas"].to_dataset(), run["atlas"].to_dataset()
    assert asked == set(atlas.data_vars) - {"name", "named", "null", "threshold"}
    assert atlas.sizes["twin"] == atlas.attrs["twins"] == 0
    for name in asked:
        xr.testing.assert_equal(atlas[name], whole[name])
    at_least = [rule.at_least if rule.score in asked else np.nan for rule in RULES]
    np.testing.assert_array_equal(atlas["threshold"], at_least)
    assert ((atlas["named"].sel(label="retrieval") == 1) == (atlas["retrieval"] > 0.1)).all()
    assert {"retrieval", "needle"} <= names(some)[2][1]
    (finding,) = (one for one in ri.findings(some) if one.variable == "retrieval")
    assert "no random-weight controls were asked for" in finding.evidence
    assert any(table.title == "Heads by name" for table in tables(some))
    assert "retrieval" in ri.atlas(some) and "distance" not in ri.atlas(some)
    with refused("retrieval are of answers, and no prompt marks a generated token and its source"):
        scored("reversal/repo", [[5, 6, 7]], "retrieval")
    with refused("no layer of this model has mirror on these prompts"):
        scored("reversal/nope", prompts, "mirror")


def test_a_name_needs_its_score_beyond_twins_and_large_and_the_others_within_limits():
    scores = {"one": np.array([[0.1, 0.3, 0.6, np.nan]]), "other": np.array([[0.0, 1.0, 1.0, 1.0]])}
    rule = Rule("a", "one", 0.2, {"other": (0.5, 1.0)})
    assert rule.holds(scores, np.array([False]), np.nan).tolist() == [[False, True, True, False]]
    assert rule.holds(scores, np.array([False]), 0.5).tolist() == [[False, False, True, False]]
    assert rule.largest(scores, np.array([False])) == 0.6
    learned = Rule("b", "one", 0.0, learned=True)
    assert not learned.holds(scores, np.array([False]), np.nan).any()
    assert np.isnan(learned.largest(scores, np.array([False])))
    assert not Rule("c", "missing", 0.0).holds(scores, np.array([False]), np.nan).any()
    assert list(name_heads(scores, np.array([False]), {"a": 0.5, "b": 0.0}, (rule, learned))) == [
        "a",
        "b",
    ]
    assert null_of(np.array([0.1, 0.4, np.nan, 0.2]), 0.95) == pytest.approx(0.5)
    assert np.isnan(null_of(np.array([np.nan]), 0.95))
    assert rule.words == "one above 0.2, other from 0.5 to 1"


# ---- a zoo model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs():
    """Two twins, with everything that the atlas takes from other groups."""
    measures = (
        "positions",
        "attention_mass",
        "components",
        "three_axis",
        "fake_distance",
        "rotation",
    )
    prompts = TASK.prompts(2)
    return {
        scheme: ri.analyze(
            ri.zoo(f"reversal/{scheme}"), prompts, measures, experiments=[Atlas(sequences=4)]
        )
        for scheme in ("repo", "rope")
    }


@pytest.fixture(scope="module")
def run(runs):
    return runs["repo"]


def test_the_mirror_heads_of_the_reversal_model_are_found(run):
    assert all({"mirror", "needle", "retrieval"} <= of for of in names(run)[2])
    assert not any("mirror" in of for row in (0, 1, 3) for of in names(run)[row])
    assert run["atlas"].attrs["twins"] == 10 and run["atlas"].sizes["twin"] == 10


def test_the_group_is_described_and_has_what_other_groups_hold_of_heads(run):
    atlas = run["atlas"].to_dataset()
    assert all({"long_name", "units"} <= set(values.attrs) for values in atlas.data_vars.values())
    assert list(atlas["label"].values) == [rule.name for rule in RULES]
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
    by_band = run["components"]["vaf_band"].mean("prompt").transpose("layer", "head", "band")
    assert (atlas["band"] == by_band.idxmax("band")).all()


def test_the_table_has_a_row_per_head_and_only_columns_that_the_run_has(run):
    table = ri.atlas(run)
    assert list(table.columns[:4]) == ["layer", "head", "scheme", "name"] and len(table) == 16
    assert {"mirror", "mass[words]", "band", "three_axis_r", "slow_pairs"} <= set(table.columns)
    left_out = ("named", "null", "effect", "reads")
    assert not any(column.startswith(left_out) for column in table.columns)
    numbers = table.drop(columns=["name", "scheme", "band"])
    assert numbers.notna().any().all(), "a column of NaN stands for something that the run lacks"
    head = table.set_index(["layer", "head"]).loc[2, 1]
    assert head["mirror"] == run["atlas"]["mirror"].sel(layer=2, head=1)
    assert head["scheme"] == "repo"
    without = ri.atlas(tree_of(attention_mass=run["attention_mass"].to_dataset()))
    assert list(without.columns[:3]) == ["layer", "head", "scheme"] and "mass[words]" in without
    with refused("--experiments atlas"):
        ri.atlas(tree_of(scores=xr.Dataset({"mean_score": ("test_set", [1.0])})))


def test_what_f_phi_reads_and_effects_of_interventions_become_columns(run):
    def made_up(values, **coordinates):
        heads = {"layer": range(4), "head": range(4)}
        attributes = {"long_name": "made up", "units": "1"}
        return xr.DataArray(values, heads | coordinates, [*heads, *coordinates], attrs=attributes)

    shares = made_up(np.full((4, 4, 2), 0.5), source=["token", "index"])
    effect = made_up(np.arange(32.0).reshape(4, 4, 2), kind=["linearised", "frozen"])
    groups = {name: node.to_dataset() for name, node in run.children.items()}
    groups |= {
        "position_sources": xr.Dataset({"share": shares}),
        "effects": xr.Dataset({"effect": effect.isel(layer=[0, 2]).expand_dims("prompt")}),
    }
    table = ri.atlas(tree_of(**groups))
    assert (table["reads[token]"] == 0.5).all() and table["effect[frozen]"].isna().sum() == 8
    assert table.loc[8, "effect[frozen]"] == 17
    assert add_columns({}).sizes == {}


def test_csv_and_parquet_hold_the_table(run, tmp_path, monkeypatch):
    table = pd.DataFrame(ri.atlas(run))
    (tmp_path / "both").mkdir()
    text, parquet = write_atlas(run, tmp_path / "both")[0]
    pd.testing.assert_frame_equal(pd.read_parquet(parquet), table)
    from_text = pd.read_csv(text, keep_default_na=False, na_values=[""]).fillna({"name": ""})
    pd.testing.assert_frame_equal(from_text, table, check_dtype=False)

    def missing(*arguments, **options):
        raise ImportError("no pyarrow")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", missing)
    (tmp_path / "one").mkdir()
    files, notes = write_atlas(run, tmp_path / "one")
    assert notes == [NO_PARQUET] and files == [tmp_path / "one" / "atlas.csv"]
    assert [*(tmp_path / "one").iterdir()] == files


def test_files_say_what_the_heads_were_measured_on(run, tmp_path):
    table, group = ri.atlas(run), run["atlas"]
    table.to_json(tmp_path / "atlas.json")
    table.to_parquet(tmp_path / "atlas.parquet")
    read = json.loads((tmp_path / "atlas.json").read_text())
    for attributes in (read["attrs"], pd.read_parquet(tmp_path / "atlas.parquet").attrs):
        for name in ("checkpoint_digest", "dtype", "prompts_digest", "prompts"):
            assert attributes[name] == run.attrs[name]
        assert attributes["twins"] == FEW.twins
        of_name, own = attributes["names"]["retrieval"], group.sel(label="retrieval")
        assert of_name["rule"] == "retrieval above 0.1"
        assert of_name["nulls"] == own["null"].values.tolist()
        assert of_name["threshold"] == float(own["threshold"])
    pd.testing.assert_frame_equal(
        pd.DataFrame(read["heads"]), pd.DataFrame(json.loads(table.to_json(orient="records")))
    )


def test_other_libraries_read_the_retrieval_scores(run, tmp_path):
    """As kvpress 0.5.5 and Retrieval_Head read their files: numpy.loadtxt and a clip; the mean of
    each list.
    """
    table = ri.atlas(run)
    scores = run["atlas"]["retrieval"].transpose("layer", "head").fillna(0).values
    assert (scores > 0).any()
    with open(table.to_duo_attention(tmp_path)) as file:
        read = np.clip(np.loadtxt(file, dtype=float, delimiter="\t"), 0, 1)
    assert read == pytest.approx(scores, abs=1e-6)
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "sink_size": 128,
        "recent_size": 256,
    }
    table.attrs["kv_heads"] = 2
    table.to_duo_attention(tmp_path, sink_size=4, recent_size=8)
    shared = np.loadtxt(tmp_path / "full_attention_heads.tsv", delimiter="\t")
    assert shared == pytest.approx(scores.reshape(len(scores), 2, -1).max(-1), abs=1e-6)
    heads = json.loads(table.to_retrieval_head(tmp_path / "heads.json").read_text())
    means = {name: np.mean(own) for name, own in heads.items()}
    wanted = {f"{layer}-{head}": score for (layer, head), score in np.ndenumerate(scores)}
    assert means == pytest.approx(wanted)
    by_content = table.to_duo_attention(tmp_path / "content", score="semantic_share")
    measured = run["fake_distance"]["semantic_share"].mean("prompt").transpose("layer", "head")
    shares = measured.values.reshape(len(scores), 2, -1).max(-1)
    assert np.loadtxt(by_content, delimiter="\t") == pytest.approx(shares, abs=1e-6)
    assert 0 < shares.min() < shares.max() < 1
    with refused("the atlas has no numbers 'absent'"):
        table.to_duo_attention(tmp_path, score="absent")
    of_one_prompt = ri.analyze(
        ri.zoo("reversal/repo"), PROMPTS[:1], ("attention_mass",), heads=[0, 2]
    )
    groups = {
        "atlas": run["atlas"].to_dataset().drop_vars("mass"),
        "attention_mass": of_one_prompt["attention_mass"].to_dataset(),
    }
    some = ri.atlas(tree_of(**{"": xr.Dataset(attrs=run.attrs)}, atlas=add_columns(groups)))
    lost = table.assign(retrieval=table["retrieval"].where(table.index != 5))
    for damaged, score, line in (
        (table[1:], "retrieval", "has 15 rows, and 1 heads have none .L0 H0."),
        (lost, "retrieval", "has 16 rows, and 1 heads have none .L1 H1."),
        (pd.concat([table, table[:1]]), "retrieval", "has 17 rows, and 0 heads have none"),
        (some, "mass[words]", "has 16 rows, and 8 heads have none .L0 H1, L0 H3"),
        (ri.atlas(of_one_prompt), "mass[words]", "does not say how many heads the model has"),
        (table, "layer", "the atlas has no numbers 'layer'"),
    ):
        for write in (damaged.to_retrieval_head, damaged.to_duo_attention):
            with refused(line):
                write(tmp_path / "part", score=score)
    for name, size in (("sink_size", -1), ("recent_size", 1.5)):
        with refused(f"{name} is {size}; wanted a whole number"):
            table.to_duo_attention(tmp_path / "part", **{name: size})
    assert not (tmp_path / "part").exists()


def test_results_with_a_table_can_be_replaced_and_lose_it(run, tmp_path):
    out = tmp_path / "out"
    plain = tree_of(patterns=run["attention_mass"].to_dataset())
    for tree, expected in ((run, 2), (plain, 0)):
        with claim_results(out, "x", overwrite=True) as claim:
            published = claim.publish(tree, lambda run, page, figures: [])
        assert len(published.tables) == expected == len(list(out.glob("atlas.*")))
    assert atlas_files.FILES == ("atlas.csv", "atlas.parquet")


def test_what_cannot_be_asked_is_refused():
    bridge = ri.zoo("reversal/nope")
    (plan,) = planned(
        bridge, TASK.prompts(3, test_set="4"), [Atlas(prompts=2, sequences=5, twins=1)]
    )
    assert plan.passes == (14, 14, *[45] * 5) * 2
    with refused("repeats random tokens"):
        Atlas().plan(bridge.original_model, TASK, TASK.prompts(1), 4)


# ---- comparison and page -------------------------------------------------------------------------


@pytest.mark.usefixtures("no_pictures")
def test_twins_are_lined_up_head_by_head_with_their_names(runs, run, tmp_path):
    compared = ri.compare(list(runs.values()))
    name, own = compared["atlas"]["name"], run["atlas"]["name"].values
    assert name.dims == ("run", "layer", "head")
    assert (name.sel(run="reversal/repo").values == own).all()
    (changed,) = (table for table in tables(compared) if table.title == "Heads whose name changes")
    assert len(changed.rows) == int((runs["rope"]["atlas"]["name"].values != own).sum()) > 0
    by_head = {row[:2]: row[2:] for row in changed.rows}
    assert by_head[2, 1][0].startswith("mirror") and "mirror" not in by_head[2, 1][1]
    few = {name: alone(one, ["name", "named", "induction"]) for name, one in runs.items()}
    assert write_report(ri.compare(few), tmp_path / "page.html", tmp_path / "figures") == []
    drawn = {file.stem for file in (tmp_path / "figures").iterdir()}
    assert drawn == {"atlas_names", "atlas_induction"}
    assert "Heads whose name changes" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_overview_clusters_standardised_columns(run):
    values, columns, heads = standardised(run["atlas"].to_dataset())
    # the same for all heads
    assert values.shape == (16, len(columns)) and heads[5] == (1, 1) and "mono" not in columns
    assert values.mean(0) == pytest.approx(0, abs=1e-9) and values.std(0) == pytest.approx(1)
    order, links = clustered(values)
    assert sorted(order) == list(range(16)) and links is not None
    places = [list(order).index(head) for head in range(8, 12)]
    assert max(places) - min(places) == 3, "the four mirror heads stand together"
    assert clustered(values[:2])[1] is None


def alone(run, variables=None):
    """The group atlas of `run` by itself."""
    atlas = run["atlas"].to_dataset()
    tree = tree_of(atlas=atlas if variables is None else atlas[variables])
    tree.attrs = run.attrs
    return tree


@pytest.mark.usefixtures("no_pictures")
def test_the_page_has_every_head_once_and_the_rules(run, tmp_path):
    data, left_out = embed(run, None)
    assert left_out == () and len(data["heads"]) == 16 == len(data["schemes"])
    by_name = {column["name"]: column for column in data["columns"]}
    assert by_name["name"]["text"] and len(by_name["mass[words]"]["values"]) == 16
    assert np.isfinite(run["atlas"]["threshold"]).all()
    (table,) = VIEW.tables(run)
    rows = {row[0]: row[1:] for row in table.rows}
    assert [*rows] == [rule.name for rule in RULES]
    assert rows["mirror"][:3] == (4, "L2\u00a0H0, L2\u00a0H1, L2\u00a0H2, L2\u00a0H3", 0.5)
    assert "mirror: mirror above 0.5" in table.note
    page = ri.plots.report_page(alone(run), tmp_path / "page.html").read_text(encoding="utf-8")
    for part in ('class="head-table"', "reportSections.atlas", "Heads by name"):
        assert part in page


@pytest.mark.usefixtures("no_pictures")
def test_a_reader_sorts_and_filters_the_table_and_opens_a_head(run, tmp_path):
    path = executable()
    if path is None:
        pytest.skip("no Chromium")
    both = tree_of(**{name: run[name].to_dataset() for name in ("positions", "atlas")})
    ri.plots.report_page(both, tmp_path / "page.html")
    browser = Browser(tmp_path / "browser", path)
    try:
        browser.open((tmp_path / "page.html").as_uri())
        rows = (
            "[...document.querySelectorAll('.head-table table tbody tr')].map((row) => "
            "row.cells[0].textContent)"
        )
        typed = (
            "Object.assign(document.querySelector('.head-table .filter'), {value: "
            "%r}).dispatchEvent(new Event('input'))"
        )
        text = "document.querySelector('.head-table %s').textContent"
        browser.wait("'alive' in document.documentElement.dataset")
        assert browser.run(rows) == [f"L{layer} H{head}" for layer in range(4) for head in range(4)]
        click = (
            "[...document.querySelectorAll('.head-table table thead "
            "button')].find((one) => one.textContent === 'distance').click()"
        )
        distance = run["atlas"]["distance"].values.ravel()
        for order in (np.argsort(-distance, kind="stable"), np.argsort(distance, kind="stable")):
            browser.run(click)
            assert browser.run(rows) == [f"L{place // 4} H{place % 4}" for place in order]
        browser.run(typed % "mirror source_mass>0.5 h1")
        assert browser.run(rows) == ["L2 H1"]
        assert browser.run(text % "output") == "1 of 16 heads"
        browser.run("document.querySelector('.head-table table tbody tr').click()")
        chosen = "document.querySelector('.tile[aria-pressed=true]').dataset.head"
        assert browser.run(chosen) == "2.1"
        assert browser.run(text % "table [aria-current] :first-child") == "L2 H1"
        browser.run(typed % "nothing-is-called-this")
        assert browser.run(rows) == [] and browser.errors == []
    finally:
        browser.close()
