"""What `helm install` says when it is done."""

from typing import Any

from helm_python import Chart

from tests.charts.rendering import CHART


def notes(values: dict[str, Any]) -> str:
    with Chart.load(str(CHART)) as chart:
        files = chart.render(values, name="demo", namespace="llm")
    [text] = [text for path, text in files.items() if path.endswith("NOTES.txt")]
    return text


def test_they_say_that_nobody_has_published_the_default_image_and_what_to_do() -> None:
    said = notes({"image": {"tag": "1.2.3"}})
    assert "Nobody has published the image baton:1.2.3" in said
    assert "docker build --file Dockerfile.cpu --tag REGISTRY/baton:1.2.3 ." in said
    assert "docker push REGISTRY/baton:1.2.3" in said
    assert (
        "helm upgrade demo charts/baton --namespace llm --reuse-values --set image.repository=REGISTRY/baton"
        in said
    )
    assert "Baton starts." in said


def test_they_are_silent_about_an_image_of_your_own() -> None:
    said = notes({"image": {"repository": "registry.example/baton"}})
    assert "published" not in said
    assert said.startswith("Baton starts.")


def test_they_name_the_pods_without_a_memory_limit() -> None:
    limited = {"resources": {"limits": {"memory": "8Gi"}}}
    assert "These pods have no memory limit: decode, prefill." in notes({})
    assert "These pods have no memory limit: prefill." in notes({"decode": limited})
    assert "memory limit" not in notes({"prefill": limited, "decode": limited})
