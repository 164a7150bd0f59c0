from hypothesis import given
from hypothesis import strategies as st

from parallel.mesh import Axis, Mesh

AXES: tuple[Axis, ...] = ("pp", "dp", "ep", "tp")
meshes = st.builds(Mesh, *[st.integers(1, 3)] * 4)


@given(meshes)
def test_every_place_is_one_rank(mesh: Mesh) -> None:
    places = [mesh.place(rank) for rank in range(mesh.size)]
    assert len(set(places)) == mesh.size
    assert [mesh.rank(place) for place in places] == list(range(mesh.size))


@given(meshes)
def test_groups_of_an_axis_split_the_ranks_and_differ_on_it_alone(mesh: Mesh) -> None:
    for axis in AXES:
        groups = list(mesh.groups(axis))
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        for group in groups:
            assert len(group) == getattr(mesh, axis)
            for index, rank in enumerate(group):
                assert mesh.group(rank, axis) == group
                place = mesh.place(rank)
                assert getattr(place, axis) == index
                assert all(getattr(place, a) == getattr(mesh.place(group[0]), a) for a in AXES if a != axis)


@given(meshes)
def test_experts_are_shared_by_the_ranks_of_a_stage_that_hold_the_same_part_of_each(mesh: Mesh) -> None:
    for rank in range(mesh.size):
        group = mesh.expert_group(rank)
        assert len(group) == mesh.num_expert_ranks
        place = mesh.place(rank)
        assert group[place.dp * mesh.ep + place.ep] == rank
        assert {(mesh.place(r).pp, mesh.place(r).tp) for r in group} == {(place.pp, place.tp)}


def test_tensor_parallel_ranks_are_neighbours() -> None:
    assert Mesh(pp=2, ep=2, tp=2).group(5, "tp") == (4, 5)
    assert Mesh(dp=2, ep=2, tp=2).expert_group(5) == (1, 3, 5, 7)
    assert str(Mesh(pp=2, tp=4)) == "tp 4 x pp 2"
    assert str(Mesh()) == "one rank"
