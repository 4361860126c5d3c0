"""The text of a case: exact both ways, and one line for every text that is no case."""
from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from profiles import many

from cases import CaseError, SparsePrefillCase, format_case, load_suite, parse_case, suite_names
from cases.strategies import sparse_prefill_cases
from cases.suites import override

EXTREMES = SparsePrefillCase(
    dtype="fp8", s_q=1 << 20, s_kv=1 << 24, h_q=1024, d_qk=512, topk=1 << 14, holes=1 / 3, lead=1 << 14, peak=5e-324,
    sm_scale=1e4, index_topk=1 << 14, pad_rows=1 << 20, metadata_rows=1 << 20, seed=(1 << 31) - 1)

MESSAGES = {
    "unknown key": ("sparse_prefill:s_qq=4", ["unknown key 's_qq'", "did you mean 's_q'?", "keys are dtype, s_q,"]),
    "unknown key, none like it": ("sparse_prefill:zzz=4", ["unknown key 'zzz' in sparse_prefill: keys are"]),
    "duplicate": ("sparse_prefill:topk=64,s_q=2,topk=65", ["topk is given twice", "64", "65"]),
    "duplicate, same value": ("sparse_prefill:topk=64,topk=64", ["topk is given twice"]),
    "not an integer": ("sparse_prefill:s_q=4.5", ["s_q=4.5", "an integer from 1 to 1048576"]),
    "an integer to Python only": ("sparse_prefill:s_q=1_0", ["s_q=1_0", "an integer from 1 to 1048576"]),
    "digits of another script": ("sparse_prefill:s_q=\u0663", ["s_q=\u0663", "an integer from 1 to 1048576"]),
    "a number to Python only": ("sparse_prefill:holes=0.1_0", ["holes=0.1_0", "a number from 0 to 1"]),
    "too small": ("sparse_prefill:h_q=0", ["h_q=0", "an integer from 1 to 1024"]),
    "too large": ("sparse_prefill:topk=16385", ["topk=16385", "an integer from 1 to 16384"]),
    "one of few integers": ("sparse_prefill:d_qk=128", ["d_qk=128", "512 or 576"]),
    "not a number": ("sparse_prefill:holes=some", ["holes=some", "a number from 0 to 1"]),
    "outside the interval": ("sparse_prefill:holes=1.5", ["holes=1.5", "a number from 0 to 1"]),
    "nan": ("sparse_prefill:peak=nan", ["peak=nan", "a number from 0 to 80"]),
    "infinite": ("sparse_prefill:sm_scale=inf", ["sm_scale=inf", "a number from 0 to 10000"]),
    "not one of the words": ("sparse_prefill:rows=triangle", ["rows=triangle", "full | half | short"]),
    "no value": ("sparse_prefill:dtype=", ["dtype=", "bf16 | fp8"]),
    "requests grammar": ("sparse_prefill:rows=causal,requests=3/x", ["requests=3/x", "qo_len[/kv_len] joined by '+'"]),
    "not key=value": ("sparse_prefill:s_q=4,full", ["'full' is not key=value"]),
    "trailing comma": ("sparse_prefill:s_q=4,", ["'' is not key=value"]),
    "no family": ("s_q=4", ["'s_q=4' is not a case", "'sparse_prefill:'"]),
    "another family": ("dense:s_q=4", ["is not a case", "'sparse_prefill:' or 'indexer_topk:'"]),
    "nearly a family": ("sparse_prefil:s_q=4", ["unknown family 'sparse_prefil'", "did you mean 'sparse_prefill'?", "indexer_topk"]),
    "nearly the other family": ("indexer_top:topk=4", ["did you mean 'indexer_topk'?"]),
    "index_topk over topk": ("sparse_prefill:topk=64,index_topk=65", ["index_topk=65", "0 to topk=64"]),
    "lead over topk": ("sparse_prefill:topk=64,lead=65", ["lead=65", "0 to topk=64"]),
    "pad_rows over s_q": ("sparse_prefill:s_q=4,pad_rows=5", ["pad_rows=5", "0 to s_q=4"]),
    "requests without causal": ("sparse_prefill:s_q=4,requests=4", ["requests=4", "only with rows=causal", "rows=full"]),
    "kv_len under qo_len": ("sparse_prefill:s_q=4,rows=causal,requests=4/3", ["requests=4/3", "kv_len 3", "qo_len 4"]),
    "requests of another batch": ("sparse_prefill:s_q=4,pad_rows=1,rows=causal,requests=4", ["requests=4", "4 query rows", "= 3"]),
    "s_kv under the requests": ("sparse_prefill:s_q=4,s_kv=5,rows=causal,requests=2/3+2/3", ["s_kv=5", "at least 6"]),
    "sm_scale of integer": ("sparse_prefill:values=integer,sm_scale=0.5", ["sm_scale=0.5", "values=integer"]),
}


@settings(deadline=None, max_examples=many(300))
@given(sparse_prefill_cases(max_work=1 << 24))
@example(SparsePrefillCase())
@example(EXTREMES)
def test_text_reads_back_to_the_same_case(case: SparsePrefillCase) -> None:
    assert parse_case(format_case(case)) == case
    assert parse_case(format_case(case, canonical=True)) == case
    assert parse_case(f"  {format_case(case).replace(',', ' , ')}\n") == case


def test_short_form_leaves_defaults_out_and_the_canonical_form_has_every_key() -> None:
    assert format_case(SparsePrefillCase()) == "sparse_prefill:"
    assert format_case(SparsePrefillCase(topk=64, seed=3)) == "sparse_prefill:topk=64,seed=3"
    canonical = format_case(SparsePrefillCase(topk=64), canonical=True)
    assert canonical.count("=") == len(dataclasses.fields(SparsePrefillCase))
    assert str(SparsePrefillCase(topk=64)) == "sparse_prefill:topk=64"


@pytest.mark.parametrize("name", MESSAGES)
def test_a_text_that_is_no_case_gives_one_line_that_names_key_value_and_what_is_allowed(name: str) -> None:
    text, parts = MESSAGES[name]
    with pytest.raises(CaseError) as error:
        parse_case(text)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("text", ["sparse_prefill:s_q=4\nx", "sparse_prefill:rows=full\nx"])
def test_a_value_with_a_line_break_is_still_one_line(text: str) -> None:
    with pytest.raises(CaseError) as error:
        parse_case(text)
    assert "\n" not in str(error.value)


def test_record_made_in_python_is_checked_as_well() -> None:
    with pytest.raises(CaseError, match="s_q=True: allowed is an integer"):
        SparsePrefillCase(s_q=True)
    with pytest.raises(CaseError, match="holes=1: allowed is a number"):
        SparsePrefillCase(holes=1)  # type: ignore[arg-type]  # an int would print as `1` and read back as 1.0


def test_live_tail_needs_metadata_that_is_handed_over() -> None:
    with pytest.raises(CaseError):
        parse_case("sparse_prefill:s_q=4,tail=live,metadata_rows=3")


def test_override_sets_some_keys_anew() -> None:
    assert override(parse_case("sparse_prefill:s_q=4,topk=64"), "topk=65,dtype=fp8") == SparsePrefillCase(s_q=4, topk=65, dtype="fp8")
    with pytest.raises(CaseError, match="index_topk=100: allowed is 0 to topk=64"):
        override(parse_case("sparse_prefill:topk=128,index_topk=100"), "topk=64")


def test_every_suite_loads_without_a_duplicate() -> None:
    assert {"smoke", "edge"} <= set(suite_names())
    for name in suite_names():
        cases = load_suite(name)
        assert len(set(cases)) == len(cases), name


def test_suite_file_with_comments_and_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("# a comment\n\nsparse_prefill:s_q=4  # and another\n   \nsparse_prefill:\n", encoding="utf-8")
    assert load_suite(str(file)) == [SparsePrefillCase(s_q=4), SparsePrefillCase()]


def test_unknown_suite_is_one_line_with_the_nearest_name_and_all_names() -> None:
    with pytest.raises(CaseError) as error:
        load_suite("smok")
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith("unknown suite 'smok': did you mean 'smoke'? suites are ")
    assert all(name in message for name in suite_names())


@pytest.mark.parametrize(("name", "said"), [
    ("/nonex/f.txt", "no file of cases '/nonex/f.txt': no such file"),
    ("corpus/sgla", "no file of cases 'corpus/sgla': did you mean 'corpus'"),
    ("smoke.txt", "no file of cases 'smoke.txt': did you mean 'smoke'? no such file"),
    ("/tmp/", "no file of cases '/tmp/': it is a folder")])
def test_a_suite_that_is_a_path(name: str, said: str) -> None:
    with pytest.raises(CaseError) as caught:
        load_suite(name)
    assert str(caught.value).startswith(said)


def test_bad_line_of_a_suite_is_named_by_file_and_number(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("# one\nsparse_prefill:s_q=4\nsparse_prefill:s_q=none\n", encoding="utf-8")
    with pytest.raises(CaseError, match=r"^mine\.txt line 3: s_q=none: allowed is an integer from 1 to 1048576$"):
        load_suite(str(file))


def test_suite_without_a_case_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(CaseError, match="holds no case"):
        load_suite(str(file))
