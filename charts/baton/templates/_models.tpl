{{/*
Every endpoint of the release, as a JSON list: one model, or those of its `config.models`. Each has
  name        of its Serve application
  label       of its pods
  prefix      of its worker groups and Ray resources; empty for the first one
  suffix      of its deployments
  fullname    of its Service
  values      its part of the values; `config` as it was given
  effective   its whole ClusterConfig, defaults included
  ingressReplicas  pods that speak HTTP
  onIngress   names of the deployments that are placed on them, and how many replicas these have, ingresses apart
  pools       for prefill and decode, what follows from both: see baton.pool
  groups      the pools that have pods of their own; on shared cards prefill instances are in decode's
  loads       for each model, what its instances load: its path, and how it guesses
  fleets      of `config.models`, whose pools are theirs: see baton.fleetsOf
*/}}
{{- define "baton.models" -}}
{{- $root := . -}}
{{- $first := pick .Values "config" "prefill" "decode" "ingress" "service" "expose" -}}
{{- $fullname := include "baton.fullname" . -}}
{{- $models := list (dict "name" "baton" "label" "baton" "prefix" "" "suffix" "" "fullname" $fullname "values" $first) -}}
{{- range $name, $given := .Values.models -}}
  {{- $values := mergeOverwrite (deepCopy $first) (deepCopy $given) -}}
  {{- $models = append $models (dict "name" $name "label" $name "prefix" (printf "%s-" $name) "suffix" "" "fullname" (printf "%s-%s" $fullname $name) "values" $values) -}}
{{- end -}}
{{- range $model := $models -}}
  {{- $defaults := $root.Files.Get "files/defaults.json" | fromJson -}}
  {{- /* Longer than a probe's period and the time that endpoints take to change on every node. */}}
  {{- $_ := set $defaults.config.serve "drain_notice_s" 10.0 -}}
  {{- /* One that is lost is not missed: Serve takes seconds to start another. */}}
  {{- $_ := set $defaults.config.serve "schedulers" (ternary 1 2 (dig "residency_groups" false (default (dict) $model.values.config) | empty | not)) -}}
  {{- $_ := set $defaults.config "ingress_instances" 2 -}}
  {{- $effective := mergeOverwrite $defaults.config (deepCopy (default (dict) $model.values.config)) -}}
  {{- $_ := set $model "effective" $effective -}}
  {{- range $kind := list "ingress" "prefill" "decode" -}}
    {{- $default := index $defaults (ternary $kind "pool" (eq $kind "ingress")) -}}
    {{- $_ := set $model.values $kind (mergeOverwrite (deepCopy $default) (default (dict) (index $model.values $kind))) -}}
  {{- end -}}
  {{- $fleets := include "baton.fleetsOf" (dict "model" $model "defaults" $defaults "modelPods" $root.Values.modelPods) | fromJsonArray -}}
  {{- if $fleets -}}
    {{- $_ := set $model "pools" dict -}}
    {{- $_ := set $model "groups" dict -}}
    {{- $_ := set $model "loads" list -}}
    {{- $_ := set $model "onIngress" (dict "names" (list "Ingress") "others" 0) -}}
  {{- else -}}
    {{- include "baton.addPools" $model -}}
    {{- $_ := set $model "loads" (list (list $effective.model.path $effective.engine.speculate)) -}}
    {{- /* A single scheduler has a spare. */}}
    {{- $_ := set $model "onIngress" (dict "names" (list "Scheduler" "Ingress") "others" (max 2 (int $effective.serve.schedulers))) -}}
  {{- end -}}
  {{- $_ := set $model "fleets" $fleets -}}
  {{- $given := $model.values.ingress.replicas -}}
  {{- $_ := set $model "ingressReplicas" (ternary $effective.ingress_instances $given (kindIs "invalid" $given) | int) -}}
{{- end -}}
{{- toJson $models -}}
{{- end -}}

{{/* Sets a model's or a fleet's `pools` and `groups`. */}}
{{- define "baton.addPools" -}}
{{- $pools := dict -}}
{{- range $role := list "prefill" "decode" -}}
  {{- if gt (index $.effective (printf "%s_instances" $role) | int) 0 -}}
    {{- $_ := set $pools $role (include "baton.pool" (dict "role" $role "model" $) | fromJson) -}}
  {{- end -}}
{{- end -}}
{{- $_ := set . "pools" $pools -}}
{{- $_ := set . "groups" (ternary (pick $pools "decode") $pools $pools.decode.shares) -}}
{{- end -}}

{{/*
One pool: perPod (instances of one pod), podsEach (pods of one instance), podGpus, replicas (of the worker group), shmBytes, and what one instance asks of Ray:
its replica (actor) and, where it has several ranks, a placement group (bundles, one for each tensor parallel group). `offered` is
what a pod offers of the pool's resource. An instance's ranks are in one pod, with a GPU each; with `hosts` in the mesh in as many pods,
where one has too few GPUs. With `gpu_share` an instance of each pool is in one pod of one GPU, which is described among `decode`'s.
*/}}
{{- define "baton.pool" -}}
{{- $config := .model.effective -}}
{{- $share := float64 (index $config .role).gpu_share -}}
{{- $shares := lt $share 1.0 -}}
{{- $pool := index .model.values (ternary "decode" .role $shares) -}}
{{- $instances := index $config (printf "%s_instances" .role) | int -}}
{{- if $shares -}}
  {{- $instances = max (int $config.prefill_instances) (int $config.decode_instances) | int -}}
  {{- if lt (int $pool.gpusPerPod) 1 -}}
    {{- fail (printf "%s: %s.gpu_share is %g, and its pods are decode's, whose gpusPerPod is 0: set decode.gpusPerPod to 1" .model.name .role $share) -}}
  {{- end -}}
{{- end -}}
{{- $ranks := include "baton.ranks" . | int -}}
{{- $node := $pool.gpusPerPod | int -}}
{{- $gpus := ternary $ranks 0 (gt $node 0) -}}
{{- $perPod := $pool.instancesPerPod | int -}}
{{- $mesh := index $config .role -}}
{{- $tp := int $mesh.tp -}}
{{- $groups := div $ranks $tp | int -}}
{{- $groupsPerPod := $groups -}}
{{- if gt $gpus $node -}}
  {{- $groupsPerPod = div $node $tp | int -}}
  {{- if or (lt $groupsPerPod 1) (gt $groups (mul $groupsPerPod (int $mesh.hosts) | int)) -}}
    {{- $where := ternary "one pod" (printf "%d pods" (int $mesh.hosts)) (eq (int $mesh.hosts) 1) -}}
    {{- fail (printf "%s: a %s instance has %d ranks, which need a GPU each in %s, but %s.gpusPerPod is %d" .model.name .role $gpus $where .role $node) -}}
  {{- end -}}
{{- end -}}
{{- $podsEach := div (add $groups $groupsPerPod -1) $groupsPerPod | int -}}
{{- if $gpus -}}{{- $perPod = ternary (min $instances (div $node $gpus)) 1 (eq $podsEach 1) | int -}}{{- end -}}
{{- if $shares -}}{{- $perPod = 1 -}}{{- end -}}
{{- $podRanks := mul $groupsPerPod $tp | int -}}
{{- if and (eq $config.engine.device "cuda") (not $gpus) -}}
  {{- fail (printf "%s: engine.device is cuda, but %s.gpusPerPod is 0" .model.name .role) -}}
{{- end -}}
{{- $needed := mul $podsEach (div (add $instances $perPod -1) $perPod) | int -}}
{{- $resource := printf "%s%s" .model.prefix .role -}}
{{- $actor := dict "num_cpus" $config.cpus_per_instance "num_gpus" (ternary (mulf $share $gpus) $gpus $shares) "resources" (dict $resource 1) -}}
{{- $bundles := list -}}
{{- if gt $ranks 1 -}}
  {{- $bundle := dict "CPU" (mulf $config.cpus_per_instance $tp) $resource 1 -}}
  {{- if $gpus -}}{{- $_ := set $bundle "GPU" $tp -}}{{- end -}}
  {{- range until $groups -}}{{- $bundles = append $bundles $bundle -}}{{- end -}}
  {{- $actor = dict "num_cpus" 0 -}}
{{- end -}}
{{- $kv := mul (int64 $config.engine.kv_bytes) $perPod -}}
{{- dict "shares" $shares "perPod" $perPod "podGpus" (ternary (mul $podRanks $perPod) 0 (gt $gpus 0) | int) "actor" $actor "bundles" $bundles "resource" $resource
    "strategy" (ternary "STRICT_PACK" "PACK" (eq (int $mesh.hosts) 1))
    "offered" (mul $perPod $groupsPerPod | int) "podsEach" $podsEach
    "replicas" (ternary $needed ($pool.replicas | int) (kindIs "invalid" $pool.replicas))
    "kvBytes" ($kv | toString)
    "shmBytes" (add $kv (include "baton.objectStoreBytes" . | int64) 1073741824 | int64 | toString) | toJson -}}
{{- end -}}

{{/* Ranks of one instance: the product of its mesh's axes. */}}
{{- define "baton.ranks" -}}
{{- $mesh := index .model.effective .role -}}
{{- mul (int $mesh.tp) (int $mesh.pp) (int $mesh.dp) (int $mesh.ep) -}}
{{- end -}}

{{/* Neither tokens nor KV pass through Ray's object store. */}}
{{- define "baton.objectStoreBytes" -}}268435456{{- end -}}

{{/*
How long a pod may take to go, in seconds: the longest request, and what the longest drain adds to it.
*/}}
{{- define "baton.drainSeconds" -}}
{{- $longest := 0.0 -}}
{{- range include "baton.models" . | fromJsonArray -}}
  {{- $longest = maxf $longest (addf .effective.serve.request_timeout_s (dig "drain_notice_s" 0 .effective.serve) .effective.serve.drain_timeout_s) -}}
{{- end -}}
{{- ceil $longest | int -}}
{{- end -}}
