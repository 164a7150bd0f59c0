{{/*
Every model and every fleet of the release, as a JSON list: what has worker groups. Those that have ingresses have `ingressReplicas`.
*/}}
{{- define "baton.fleets" -}}
{{- $all := list -}}
{{- range $model := include "baton.models" . | fromJsonArray -}}
  {{- $all = concat (append $all (omit $model "fleets")) $model.fleets -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{/*
The fleets of an endpoint, as a JSON list: of each row of `config.models`, or of a residency group's rows together, whose instances
are in the same processes. Empty without a table. Each has what a model has but ingresses, and
  application  the endpoint's name
`effective` is that of any row of a group, but for KV: as much as the models have that may be awake at once.
*/}}
{{- define "baton.fleetsOf" -}}
{{- $model := .model -}}
{{- $given := default (dict) $model.values.config -}}
{{- $residency := default (dict) $given.residency_groups -}}
{{- $shared := omit $given "models" "residency_groups" -}}
{{- $order := list -}}
{{- $rows := dict -}}
{{- range $name, $row := default (dict) $given.models -}}
  {{- $row = ternary (dict "path" $row) $row (kindIs "string" $row) -}}
  {{- $named := dict "model" (dict "path" $row.path "name" $name) -}}
  {{- $effective := mergeOverwrite (deepCopy $.defaults.config) (deepCopy $shared) (deepCopy (omit $row "path" "aliases")) $named -}}
  {{- $group := $effective.schedule.residency.group -}}
  {{- if and $group (not (hasKey $residency $group)) -}}
    {{- fail (printf "config.models.%s.schedule.residency.group: %q is not among config.residency_groups" $name $group) -}}
  {{- end -}}
  {{- $fleet := default $name $group -}}
  {{- if not (hasKey $rows $fleet) -}}{{- $order = append $order $fleet -}}{{- end -}}
  {{- $_ := set $rows $fleet (append (default list (get $rows $fleet)) $effective) -}}
{{- end -}}
{{- $fleets := list -}}
{{- range $name := $order -}}
  {{- $label := include "baton.label" $name -}}
  {{- $fleet := dict "name" $name "label" $label "application" $model.name "prefix" (printf "%s%s-" $model.prefix $label) "fullname" (printf "%s-%s" $model.fullname $label) "suffix" (include "baton.suffix" $name) -}}
  {{- include "baton.addRows" (dict "fleet" $fleet "rows" (get $rows $name) "awake" (dig $name "awake_models" 0 $residency | int)) -}}
  {{- $own := default (dict) (get $.modelPods $name) -}}
  {{- $pods := dict -}}
  {{- range $role := list "prefill" "decode" -}}
    {{- $_ := set $pods $role (mergeOverwrite (deepCopy (index $model.values $role)) (deepCopy (default (dict) (get $own $role)))) -}}
  {{- end -}}
  {{- /* What is said of all rows need not be taken back for one on shared cards. */}}
  {{- if and (lt (float64 $fleet.effective.decode.gpu_share) 1.0) (not $own.prefill) -}}{{- $_ := set $pods "prefill" $pods.decode -}}{{- end -}}
  {{- $_ := set $fleet "values" $pods -}}
  {{- include "baton.addPools" $fleet -}}
  {{- $fleets = append $fleets $fleet -}}
{{- end -}}
{{- toJson $fleets -}}
{{- end -}}

{{/* Sets what a fleet has of its rows. `awake` of them have memory at once; 0: there is one, in no group. */}}
{{- define "baton.addRows" -}}
{{- $fleet := .fleet -}}
{{- $effective := deepCopy (first .rows) -}}
{{- $schedulers := list -}}
{{- $loads := list -}}
{{- range .rows -}}
  {{- $schedulers = append $schedulers (printf "Scheduler%s" (include "baton.suffix" .model.name)) -}}
  {{- $loads = append $loads (list .model.path .engine.speculate) -}}
{{- end -}}
{{- $others := mul (len .rows) (int $effective.serve.schedulers) | int -}}
{{- if .awake -}}
  {{- include "baton.checkGroup" . -}}
  {{- $_ := set $effective "engine" (include "baton.engineOfGroup" . | fromJson) -}}
  {{- $schedulers = append $schedulers (printf "Group%s" $fleet.suffix) -}}
  {{- $others = add 1 $others | int -}}
{{- else -}}
  {{- $others = max 2 $others -}}
{{- end -}}
{{- $_ := set $fleet "loads" $loads -}}
{{- $_ := set $fleet "onIngress" (dict "names" $schedulers "others" $others) -}}
{{- $_ := set $fleet "effective" $effective -}}
{{- end -}}

{{/* The engine of a group's first model, with KV for as many models as may be awake at once: those that have the most. */}}
{{- define "baton.engineOfGroup" -}}
{{- $bytes := list -}}
{{- $blocks := 0 -}}
{{- $open := false -}}
{{- range .rows -}}
  {{- $bytes = append $bytes (int64 .engine.kv_bytes | printf "%020d") -}}
  {{- $blocks = max $blocks (int64 .engine.num_blocks) -}}
  {{- if not .engine.kv_bytes -}}{{- $open = true -}}{{- end -}}
{{- end -}}
{{- $most := 0 -}}
{{- range $i, $text := sortAlpha $bytes | reverse -}}
  {{- if lt $i $.awake -}}{{- $most = add $most (atoi $text) -}}{{- end -}}
{{- end -}}
{{- mergeOverwrite (deepCopy (first .rows).engine) (dict "kv_bytes" (ternary 0 $most $open) "num_blocks" $blocks) | toJson -}}
{{- end -}}

{{/* Fails where a group's models cannot be in the same processes. */}}
{{- define "baton.checkGroup" -}}
{{- $first := first .rows -}}
{{- range $row := .rows -}}
  {{- range $key := list "any_role" "prefill_instances" "decode_instances" "prefill" "decode" "cpus_per_instance" -}}
    {{- if ne (index $row $key | toJson) (index $first $key | toJson) -}}
      {{- fail (printf "config.models.%s: %s is not as in %s, and both are in the same pods (config.residency_groups.%s): make them equal" $row.model.name $key $first.model.name $.fleet.name) -}}
    {{- end -}}
  {{- end -}}
  {{- if gt (int $row.serve.schedulers) 1 -}}
    {{- fail (printf "config.serve.schedulers is %d, and config.residency_groups.%s needs one for each model: leave it out" (int $row.serve.schedulers) $.fleet.name) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* What the names of a row's or a group's deployments end with (cluster/deploy/deployment_names.py). */}}
{{- define "baton.suffix" -}}
-{{ regexReplaceAll "[^A-Za-z0-9_.-]" . "-" }}
{{- end -}}

{{/* A row's or a group's name as a DNS label of at most 22 characters. */}}
{{- define "baton.label" -}}
{{- $label := regexReplaceAll "[^a-z0-9]+" (lower .) "-" | trimSuffix "-" -}}
{{- if gt (len $label) 22 -}}{{- $label = printf "%s-%s" (trunc 17 $label | trimSuffix "-") (sha256sum . | trunc 4) -}}{{- end -}}
{{- $label -}}
{{- end -}}
