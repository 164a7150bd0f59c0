"""GPUs and channels by claims (DRA), in place of a device plug-in's resources."""

import pytest
from helm_python import HelmError

from cluster.deploy.kube.worker_groups import offered_resources
from tests.charts.rendering import Object, cluster_spec, container, example, of_kind, pods, render
from tests.charts.schemas import check, check_pod

CLAIMED: Object = {
    "config": {"decode_instances": 4, "decode": {"tp": 2}, "prefill_instances": 0},
    "decode": {"gpusPerPod": 8, "gpuDeviceClass": "gpu.nvidia.com"},
}


def test_gpus_are_claimed_by_their_class_and_ray_is_told_how_many() -> None:
    objects = render(CLAIMED)
    template = of_kind(objects, "ResourceClaimTemplate")["demo-baton-decode-gpus"]
    check(template)
    [request] = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {
        "deviceClassName": "gpu.nvidia.com",
        "allocationMode": "ExactCount",
        "count": 8,
    }
    [group] = [one for one in cluster_spec(objects)["workerGroupSpecs"] if one["groupName"] == "decode"]
    assert group["rayStartParams"]["num-gpus"] == "8"
    assert offered_resources(group) == {"decode": 4}
    pod = group["template"]
    check_pod(pod)
    assert pod["spec"]["resourceClaims"] == [
        {"name": "gpus", "resourceClaimTemplateName": template["metadata"]["name"]}
    ]
    for one in [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]:
        assert one["resources"]["claims"] == [{"name": "gpus"}], one["name"]
        assert "nvidia.com/gpu" not in one["resources"].get("limits", {})
    assert "resourceClaims" not in pods(objects)["ingress"]["spec"]


def test_all_pools_of_a_model_are_in_one_compute_domain() -> None:
    objects = example("nvl72")
    domain = of_kind(objects, "ComputeDomain")["demo-baton"]
    check(domain)
    channel = domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
    for name in ("prefill", "decode"):
        claims = {one["name"]: one for one in pods(objects)[name]["spec"]["resourceClaims"]}
        assert claims["imex"]["resourceClaimTemplateName"] == channel
        assert {"name": "imex"} in container(pods(objects)[name])["resources"]["claims"]
    assert not of_kind(render(CLAIMED), "ComputeDomain")


def test_more_claims_reach_the_containers_and_the_preflight_pods() -> None:
    nic = {"name": "nic", "resourceClaimTemplateName": "rdma-nic"}
    decode = {**CLAIMED["decode"], "resourceClaims": [nic]}
    objects = render({**CLAIMED, "decode": decode, "preflight": {"job": True}})
    [job] = [job for name, job in of_kind(objects, "Job").items() if name.endswith("preflight")]
    check(job)
    for spec in (pods(objects)["decode"]["spec"], job["spec"]["template"]["spec"]):
        assert nic in spec["resourceClaims"]
        assert spec["containers"][0]["resources"]["claims"] == [{"name": "gpus"}, {"name": "nic"}]


@pytest.mark.parametrize(
    ("decode", "why"),
    [
        ({"gpuDeviceClass": "gpu.nvidia.com"}, "decode.gpusPerPod is 0"),
        ({"imex": True}, "decode.gpusPerPod is 0"),
        ({"gpusPerPod": 8, "gpuDeviceClass": "a", "gpuResource": "b.example/gpu"}, "choose one"),
    ],
)
def test_claims_that_could_not_work_are_refused(decode: Object, why: str) -> None:
    with pytest.raises(HelmError, match=why):
        render({"decode": decode})
