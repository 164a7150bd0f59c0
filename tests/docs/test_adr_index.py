"""The list of decision records names each of them, with its date and what supersedes it."""

from docs.adr_index import FOLDER, page, records


def test_the_list_is_what_the_records_say() -> None:
    assert (FOLDER / "README.md").read_text() == page(), "run `python docs/adr_index.py`"


def test_every_record_has_a_number_of_its_own_and_names_its_file() -> None:
    found = list(records())
    numbers = [record.number for record in found]
    assert len(set(numbers)) == len(numbers) > 60
    assert [record.path.name[:3] for record in found] == numbers
    assert {record.superseded_by for record in found} - {""} <= set(numbers)
