#!/usr/bin/env bash
# The checks that .ci/run has no time for, to be run before a release. Each part can be run alone:
#
#   scripts/release_check.sh            # all of them
#   scripts/release_check.sh mutants seeds
#
# They need an environment with `pip install -e ".[dev,aot]"`. GPU kernels compile on JAX 0.11 and later only, and are
# interpreted on 0.11.2 and later; with an older JAX their parts are left out. So `slow` is to be run twice, with the
# oldest and the newest Python of .ci/run, and `quick` with the newest, of which .ci/run runs a part there. Each part
# prints a header and the seconds it took; a failure does not end the run.
set -uo pipefail
cd "$(dirname "$0")/.."
export JAX_PLATFORMS=cpu
export JAX_DISABLE_MOST_OPTIMIZATIONS=False  # For users; tests/conftest.py turns them off.
logs=$(mktemp -d)
failed=()

gates() { # Every cell of the compile gates, a layer over four chips, and the candidate for prefill on Hopper.
  local runs=()
  for chip in v5e v6e v7x a100 h200 b200; do
    case $chip in
      [abh]*) python -c "import sys, jax; sys.exit(jax.__version_info__ < (0, 11))" || continue ;;
    esac
    runs+=("--chip $chip --output $logs/gate_$chip.json" "--chip $chip --layer")
    [ $chip != h200 ] || runs+=("--chip h200 --prefill wgmma")
  done
  # Two at a time; of the cells only those that do not compile are printed, and each run's count.
  printf '%s\n' "${runs[@]}" | xargs -P 2 -I{} bash -c \
    "python scripts/compile_gate.py {} 2>'$logs'/gate.\$\$ | grep -v ': compiles\$'; [ \${PIPESTATUS[0]} = 0 ] || { tail -n 40 '$logs'/gate.\$\$; exit 1; }"
}
gates_cuda13() { # The cells of the GPUs on the stack of machines with CUDA 13: an environment of its own, 250 MB of wheels.
  command -v python3.12 >/dev/null || { echo "needs python3.12"; return 1; }
  local venv=$logs/cuda13
  python3.12 -m venv "$venv" || return 1
  # Compilers alone, without cuDNN and cuBLAS; the checkout is found by PYTHONPATH.
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.11.2 jax-cuda13-plugin==0.11.2 \
    jax-cuda13-pjrt==0.11.2 "nvidia-cuda-nvcc>=13,<14" "nvidia-cuda-runtime>=13,<14" "nvidia-nvvm>=13,<14" \
    "flax>=0.12" "jaxtyping>=0.3" || return 1
  local failed_chips=()
  for chip in a100 h200 b200; do
    PYTHONPATH=$PWD "$venv/bin/python" scripts/compile_gate.py --chip "$chip" --output "$logs/gate_${chip}_cuda13.json" \
      2>"$logs/gate.$chip" | grep -v ': compiles$'
    [ "${PIPESTATUS[0]}" = 0 ] || { failed_chips+=("$chip"); tail -n 40 "$logs/gate.$chip"; }
  done
  [ ${#failed_chips[@]} -eq 0 ]
}
mutants() { python scripts/named_mutants.py; }
seeds() { python scripts/simulate.py --seeds 0:20000 --jobs 2; }
steps() { python -m pytest tests/test_device_compile.py -m slow && python scripts/mesh_costs.py; }
quick() { python -m pytest; }
slow() { python -m pytest -m slow --ignore tests/test_device_compile.py --ignore tests/test_readme.py; }
serving_process() { # All tests of servers once more, with the core in a process.
  JPAGED_TEST_CORE=process python -m pytest -m "slow or not slow" tests/jpaged/serving
}
soak() { # Ten minutes with a fault every ten seconds, for each client, and for two core processes.
  python scripts/soak.py --minutes 10 --faults --core thread &&
    python scripts/soak.py --minutes 10 --faults --core process &&
    python scripts/soak.py --minutes 10 --faults --core process --replicas 2
}
live() { python scripts/live_weights.py && python scripts/array_costs.py; }
examples() { # Beside the libraries that they are for, which need environments of their own.
  local name venv
  for name in lm_eval google-tunix; do
    venv=$logs/$name
    python -m venv "$venv" && "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[dev]" || return 1
    if [ $name = lm_eval ]; then
      "$venv/bin/python" -m pip install --quiet --disable-pip-version-check lm_eval || return 1
    else # Its requirements name libraries for TPUs and for other engines too; these are what the example needs.
      "$venv/bin/python" -m pip install --quiet --disable-pip-version-check optax google-metrax orbax-checkpoint qwix grain \
        omegaconf tqdm absl-py python-dotenv huggingface_hub sentencepiece pillow perfetto pandas || return 1
      "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps google-tunix==0.1.7 || return 1
    fi
    "$venv/bin/python" -m pytest -m slow tests/test_examples.py -k "${name#google-}" -rs || return 1
  done
}
torch() { # What a trainer has saved, opened by transformers: torch is no requirement of ours.
  local venv=$logs/torch
  python -m venv "$venv" && "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[dev]" torch || return 1
  "$venv/bin/python" -m pytest -m "slow or not slow" tests/jpaged/research/test_checkpoint_modules.py -k transformers_opens -rs
}
readme() { python -m pytest tests/test_readme.py -m slow; }
page() { # The server's page, in Chromium; where it is missing, .ci/run skips these tests.
  command -v chromedriver >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver curl; } || return 1
  python -m pytest tests/jpaged/serving/test_page.py
}
ray() { # Runs on a cluster, and the example of Ray Serve: CI has no Ray, whose wheels are 200 MB.
  local venv=$logs/ray
  python -m venv "$venv" && "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[dev,ray]" || return 1
  "$venv/bin/python" -m pytest -m "slow or not slow" tests/jpaged/cluster -rs
}
clients() { python scripts/serve_clients.py && python scripts/tool_turns.py; } # Their environments, of 9 GB, stay in the user's cache folder.

for part in "${@:-gates gates_cuda13 mutants seeds steps quick slow serving_process soak live examples torch readme page ray clients}"; do
  for name in $part; do
    echo "== $name"
    start=$SECONDS
    "$name" || failed+=("$name")
    echo "== $name took $((SECONDS - start)) s"
  done
done
rm -rf "$logs"
echo "== failed: ${failed[*]:-none}; $SECONDS s"
[ ${#failed[@]} -eq 0 ]
