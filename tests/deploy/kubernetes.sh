#!/usr/bin/env bash
# deploy/kubernetes against the schemas of the API, of Prometheus's operator and of JobSet, strictly: a field that does not
# exist is an error. Not one of ctest's: it takes packages with all schemas, 26 MB, from PyPI.
#
#   tests/deploy/kubernetes.sh [VERSION ...]      versions of Kubernetes (default: the oldest and newest of interest)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../deploy/kubernetes"

fail() {
  echo "kubernetes.sh: $*" >&2
  exit 1
}
versions=("$@")
((${#versions[@]} > 0)) || versions=(1.29 1.34)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --disable-pip-version-check kubernetes-validate==1.37.0 \
  cloudcoil-models-prometheus-operator==0.80.1.0 kubeflow-trainer-api==2.3.0 || fail "pip failed; the lines above say why"
validate() { "$scratch/venv/bin/kubernetes-validate" --strict --kubernetes-version "$@"; }

# The models leave out what they do not know.
cat >"$scratch/pod_monitor.py" <<'PYTHON'
import sys, yaml
from cloudcoil.models.prometheus_operator import v1
given = yaml.safe_load(open(sys.argv[1]))
known = v1.PodMonitor.model_validate(given).model_dump(mode="json", by_alias=True, exclude_unset=True)
sys.exit(known != given)
PYTHON
pod_monitor() { "$scratch/venv/bin/python" "$scratch/pod_monitor.py" "$1"; }
pod_monitor podmonitor.yaml || fail "Prometheus's operator knows no such PodMonitor"
for mistake in 's/scheme: https/schema: https/' 's/scheme: https/scheme: tls/' 's/keySecret:/key:/' 's/jobLabel: .*/jobLabel: {}/'; do
  sed "$mistake" podmonitor.yaml >"$scratch/mistake.yaml"
  if pod_monitor "$scratch/mistake.yaml" >/dev/null 2>&1; then fail "$mistake passed"; fi
done
echo "kubernetes.sh: Prometheus's operator takes podmonitor.yaml"

# Its objects one by one: the API's own into a file, and the Job of a JobSet as one of them. These models keep what they do
# not know in additional_properties, or leave it out.
cat >"$scratch/job_set.py" <<'PYTHON'
import sys, yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet as JobSet
own = []
for given in yaml.safe_load_all(open(sys.argv[1])):
    if given["kind"] != "JobSet":
        own.append(given)
        continue
    known = JobSet.from_dict(given).to_dict()
    for of_known, job in zip(known["spec"]["replicatedJobs"], given["spec"]["replicatedJobs"]):
        del of_known["template"]
        own.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job.pop("template")})
    if known != given:
        sys.exit(f"JobSet {given['metadata']['name']} is known as {known}")
yaml.safe_dump_all(own, open(sys.argv[2], "w"))
PYTHON
job_set() { "$scratch/venv/bin/python" "$scratch/job_set.py" "$1" "$scratch/$2"; }
job_set node_local.yaml node_local.yaml || fail "JobSet knows no such set"
for mistake in 's/failurePolicy:/failPolicy:/' 's/maxRestarts: 10/maxRestart: 10/' 's/replicatedJobs:/jobs:/' 's/subdomain:/domain:/' 's/maxRestarts: 10/maxRestarts: ten/'; do
  sed "$mistake" node_local.yaml >"$scratch/mistake.yaml"
  if job_set "$scratch/mistake.yaml" of_mistake.yaml >/dev/null 2>&1; then fail "$mistake passed"; fi
done
echo "kubernetes.sh: JobSet takes node_local.yaml"

own=(ballast.yaml training.yaml "$scratch/node_local.yaml") # Of kinds that are the API's own.
for version in "${versions[@]}"; do
  validate "$version" "${own[@]}" || fail "Kubernetes $version refuses what the lines above name"
  # The other lines for huge pages, which are comments.
  sed -E '/^ +# .*[Hh]uge[Pp]ages-2Mi/{s/# //;n;d}' ballast.yaml >"$scratch/huge.yaml"
  [[ $(grep -ci '^[^#]*hugepages-2Mi' "$scratch/huge.yaml") == 2 ]] || fail "the lines for huge pages are not there"
  validate "$version" "$scratch/huge.yaml" || fail "Kubernetes $version refuses the lines for huge pages"
  # It can tell: each of these is a mistake.
  for mistake in 's/scheme: HTTPS/schema: HTTPS/' 's/namespaceSelector:/namespaces:/' 's/serviceName:/serviceNames:/' 's/replicas: 2/replicas: two/' 's/maxUnavailable: 0/maxUnavailable: {}/'; do
    sed "$mistake" ballast.yaml >"$scratch/mistake.yaml"
    if validate "$version" "$scratch/mistake.yaml" >/dev/null 2>&1; then fail "$mistake passed"; fi
  done
  for mistake in 's/startupProbe:/startProbe:/' 's/completionMode:/mode:/' 's/initContainers:/sidecars:/'; do
    sed "$mistake" "$scratch/node_local.yaml" >"$scratch/mistake.yaml"
    if validate "$version" "$scratch/mistake.yaml" >/dev/null 2>&1; then fail "$mistake passed"; fi
  done
  echo "kubernetes.sh: $version takes ballast.yaml, training.yaml and node_local.yaml"
done
