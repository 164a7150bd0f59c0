"""The API of one ingress, from the cluster's configuration and the model's card."""

from collections import ChainMap
from functools import partial
from pathlib import Path

from fastapi import FastAPI

from cluster.ingress.batches.batch_import import import_folder
from cluster.ingress.batches.batch_runner import BatchRunner
from cluster.ingress.delivery.generator import Generator
from cluster.ingress.generation.request_params import ApiSettings
from cluster.ingress.http_app import create_app
from cluster.ingress.images.image_fetching import ImageFetcher
from cluster.ingress.images.image_intake import ImageIntake
from cluster.ingress.model_card import ModelCard, describe_adapter
from cluster.ingress.telemetry.observers import Observers
from cluster.ingress.tenants.access import Access
from cluster.store.open_store import open_store
from core.config.adapter_config import ServedAdapter
from core.config.cluster_config import ClusterConfig
from core.config.store_url import store_reader
from models.text.tokenizer import load_tokenizer
from models.vision.image_reader import ImageReader


def build_app(
    generator: Generator, config: ClusterConfig, card: ModelCard, access: Access, observers: Observers
) -> FastAPI:
    settings = api_settings(config, card, generator.adapters.served)
    tokenizer = load_tokenizer(card.folder)
    serve, store = config.serve, open_store(config.serve)
    app = create_app(generator, tokenizer, settings, access, observers, store)
    app.state.store = store
    if settings.file_store_bytes:
        app.state.batches = BatchRunner(
            app, store, access, card.name, at_once=serve.batch_at_once, slo_class=serve.batch_slo_class
        )
        app.state.importing = partial(import_folder, store, serve.batch_dir)
    return app


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
        response_store_bytes=config.serve.response_store_bytes,
        response_age_s=config.serve.response_age_s,
        file_store_bytes=config.serve.batch_dir_bytes if store_reader(config.serve) else 0,
        tool_call_parser=config.model.tool_call_parser,
        reasoning_parser=config.model.reasoning_parser,
        tokenizer_folder=Path(card.folder),
        pooling=card.pooling,
        generates=card.generates,
        embedding_size=card.embedding_size,
        images=images,
        image_fetcher=fetcher,
    )


async def run_batches(app: FastAPI) -> None:
    """Run the batches that clients of `app` hand in, until cancelled. Returns at once where batches are off."""
    runner: BatchRunner | None = getattr(app.state, "batches", None)
    if runner is not None:
        await app.state.importing()
        await runner.run()
