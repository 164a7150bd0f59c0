"""The API of one ingress, from the cluster's configuration and the model's card."""

import asyncio
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fastapi import FastAPI

from cluster.ingress.batches.batch_import import import_folder
from cluster.ingress.batches.batch_runner import BatchRunner
from cluster.ingress.delivery.frontend import Frontend
from cluster.ingress.generation.request_params import ApiSettings
from cluster.ingress.generation.served_model import ServedModel
from cluster.ingress.http_app import create_app_of
from cluster.ingress.images.image_fetching import ImageFetcher
from cluster.ingress.images.image_intake import ImageIntake
from cluster.ingress.model_card import ModelCard, describe_adapter
from cluster.ingress.operator.adapter_routes import Describe
from cluster.ingress.telemetry.joined_metrics import joined_registry
from cluster.ingress.telemetry.observers import Observers, make_observers
from cluster.ingress.tenants.access import Access
from cluster.ingress.tenants.ledger import UsageLedger, journal_folder
from cluster.store.open_store import open_store
from core.config.adapter_config import ServedAdapter
from core.config.cluster_config import ClusterConfig
from core.config.store_url import store_reader
from core.errors import ConfigError
from models.text.tokenizer import load_tokenizer
from models.vision.image_reader import ImageReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBehind:
    """A model that is to be served, and what it is asked through."""

    generator: Frontend
    config: ClusterConfig
    """Its row's (`ClusterConfig.rows`)."""
    card: ModelCard
    observers: Observers


def door_observers(config: ClusterConfig, models: Sequence[ModelBehind]) -> Observers:
    """Return the observers of what is of no model. Their registry has the figures of all models."""
    if not config.models:
        return models[0].observers
    own = make_observers("")
    by_model = {model.card.name: model.observers.registry for model in models}
    return replace(own, registry=joined_registry(own.registry, by_model))


def build_app(
    generator: Frontend, config: ClusterConfig, card: ModelCard, access: Access, observers: Observers
) -> FastAPI:
    """Build the API of one model."""
    model = ModelBehind(generator=generator, config=config, card=card, observers=observers)
    return build_app_of([model], config, access, observers)


def build_app_of(
    models: Sequence[ModelBehind], config: ClusterConfig, access: Access, observers: Observers
) -> FastAPI:
    """Build the API of all models. `observers` are those of the door."""
    serve, store = config.serve, open_store(config.serve)
    served: list[ServedModel] = []
    for model in models:
        settings = api_settings(model.config, model.card, model.generator.adapters.served)
        own = config.models[model.card.name].slo_classes if config.models else {}
        settings = replace(settings, slo_classes=own, describe_adapter=_unless_taken(settings, served))
        served.append(
            ServedModel(
                generator=model.generator,
                tokenizer=load_tokenizer(model.card.folder),
                settings=settings,
                observers=model.observers,
            )
        )
    access.lease_from(models[0].generator.ask_shares)
    app = create_app_of(served, access, observers, store)
    app.state.store = store
    if served[0].settings.file_store_bytes:
        names = [model.card.name for model in models]
        at_once, slo_class = serve.batch_at_once, serve.batch_slo_class
        app.state.batches = BatchRunner(
            app, store, access, names[0], at_once=at_once, slo_class=slo_class, more_models=names[1:]
        )
        app.state.importing = partial(import_folder, store, serve.batch_dir)
    return app


def _unless_taken(own: ApiSettings, served: Sequence[ServedModel]) -> Describe | None:
    """Return the model's `describe_adapter`, which refuses the names of other models and of their adapters."""
    if (describe := own.describe_adapter) is None:
        return None

    def described(name: str, path: str) -> ServedAdapter:
        for model in served:
            if model.name != own.model_name and name in model.settings.names:
                raise ConfigError(f"{name!r} is a name of the model {model.name}: choose another one")
        return describe(name, path)

    return described


def api_settings(
    config: ClusterConfig, card: ModelCard, live: dict[str, ServedAdapter] | None = None
) -> ApiSettings:
    """Return what requests are judged by. `live` are adapters beside the configuration's, which may change. Raises ConfigError
    where images' processor is missing."""
    images = fetcher = None
    if card.image_token >= 0:
        images = ImageIntake(ImageReader(Path(card.folder), card.image_token), config.pictures)
        fetcher = ImageFetcher(config.pictures) if config.pictures.url_hosts else None
    return ApiSettings(
        model_name=card.name,
        aliases=config.model.aliases,
        adapters=ChainMap({} if live is None else live, dict(card.adapters)),
        max_adapters=len(card.adapters) + config.adapters.num_slots,
        describe_adapter=partial(describe_adapter, config, card) if config.adapters.folders else None,
        allowed_origins=config.serve.allowed_origins,
        max_context_tokens=card.max_context_tokens,
        vocab_size=card.vocab_size,
        eos_token_ids=card.eos_token_ids,
        default_sampling=card.default_sampling,
        unknown_fields=config.serve.unknown_fields,
        max_body_bytes=config.serve.max_body_bytes,
        body_timeout_s=config.serve.body_timeout_s,
        keep_alive_s=config.serve.keep_alive_s,
        resume_s=config.serve.resume_s,
        response_store_bytes=config.serve.response_store_bytes,
        response_age_s=config.serve.response_age_s,
        file_store_bytes=config.serve.batch_dir_bytes if (read_url := store_reader(config.serve)) else 0,
        usage_folder=journal_folder(config.serve.usage_dir, read_url() if read_url else None),
        tool_call_parser=config.model.tool_call_parser,
        reasoning_parser=config.model.reasoning_parser,
        tokenizer_folder=Path(card.folder),
        pooling=card.pooling,
        sleeps_on_demand=config.schedule.residency.mode == "on_demand",
        generates=card.generates,
        embedding_size=card.embedding_size,
        images=images,
        image_fetcher=fetcher,
    )


async def run_batches(app: FastAPI) -> None:
    """Run until cancelled the batches that clients of `app` hand in, and background responses whose ingress is gone. Write down
    the usage of ingresses that were killed."""
    ledger: UsageLedger = app.state.ledger
    runner: BatchRunner | None = getattr(app.state, "batches", None)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ledger.follow_the_dead())
        for background in app.state.background:
            tasks.create_task(background.run())
        if runner is not None:
            await app.state.importing()
            await runner.run()


async def close_store(app: FastAPI) -> None:
    """Write down what was used, then end the connections to the database."""
    ledger: UsageLedger = app.state.ledger
    try:
        await ledger.close()
    finally:
        await asyncio.to_thread(app.state.store.close)
