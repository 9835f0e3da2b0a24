"""A run, its token files and its export in servers of the protocols of GCS and S3 on this machine.

They need `pip install gcsfs s3fs "moto[server,s3]" gcp-storage-emulator`.
"""

import dataclasses
import json
import urllib.request

import jax
import numpy as np
import pytest

import lnssm_jax
from lnssm_jax.files.buckets import Bucket
from train.runs import export, loading
from train.trainer import fit

pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings("ignore"),  # of packages that the library does not have
]


@pytest.fixture(params=["gs", "s3"])
def scheme(request, monkeypatch):
  """The scheme of a bucket `lab` on a server of this process."""
  if request.param == "gs":
    pytest.importorskip("gcsfs", reason="needs gcsfs")
    server = pytest.importorskip("gcp_storage_emulator.server", reason="needs gcp-storage-emulator")
    started = server.create_server("127.0.0.1", 0, in_memory=True)
    started.start()
    host = "http://{}:{}".format(*started._api._httpd.server_address)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
    body = json.dumps({"name": "lab"}).encode()
    kind = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{host}/storage/v1/b?project=p", body, kind))
  else:
    pytest.importorskip("s3fs", reason="needs s3fs")
    moto = pytest.importorskip("moto.server", reason="needs moto[server]")
    started = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    started.start()
    host = "http://{}:{}".format(*started.get_host_and_port())
    names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    for name, value in zip(names, (host, "x", "x", "us-east-1"), strict=True):
      monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{host}/lab", method="PUT"))
  import fsspec

  fsspec.filesystem(request.param).clear_instance_cache()
  yield request.param
  started.stop()


def test_run_text_and_export_on_a_server(scheme, tiny, monkeypatch, tmp_path):
  become = lambda name: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
  become("a")
  optimizer = dataclasses.replace(tiny().optimizer, schedule="constant")
  data = dataclasses.replace(tiny().data, folder=f"{scheme}://lab/deep/data")
  plan = {"checkpoint_every": 2, "keep_checkpoints": 1, "optimizer": optimizer}
  whole = fit(tiny(steps=6, **plan)).state["params"]
  run = f"{scheme}://lab/deep/run"
  cfg = tiny(steps=6, run_dir=run, data=data, **plan)
  fit(dataclasses.replace(cfg, steps=4))
  steps = {name.split("/")[1] for name in Bucket(run).files("checkpoints")}
  assert steps == {"4"}

  become("b")
  resumed = fit(cfg).state["params"]
  for ours, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
  become("c")
  assert loading.load_model(run).step == 6
  export.export_run(run, f"{scheme}://lab/exported")
  become("d")
  assert lnssm_jax.load_model(f"{scheme}://lab/exported").step == 6
