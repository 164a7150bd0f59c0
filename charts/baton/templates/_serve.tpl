{{/*
The Serve configuration: one application for each model. `args` is the model's ClusterConfig; what the chart itself decides
(where secrets are mounted, which address to listen on) is put over it.
*/}}
{{- define "baton.serveConfig" -}}
proxy_location: Disabled
applications:
{{- range $model := include "baton.models" . | fromJsonArray }}
- name: {{ $model.name }}
  import_path: cluster.deploy.serve_app:build
  route_prefix: null
  {{- if include "baton.scales" $model }}
  external_scaler_enabled: true
  {{- end }}
  args:
    {{- include "baton.args" (dict "root" $ "model" $model) | nindent 4 }}
  deployments:
  {{- /* The pods' resource bounds how many there are: with their models these become more than the pods have processors. */}}
  {{- $cpus := ternary 0 0.1 (not (empty $model.fleets)) }}
  {{- range $fleet := prepend $model.fleets $model }}
  {{- range $fleet.onIngress.names }}
  - name: {{ . }}
    ray_actor_options: {num_cpus: {{ $cpus }}, resources: { {{ $model.prefix }}ingress: 1}}
  {{- end }}
  {{- range $role, $pool := $fleet.pools }}
  - name: {{ title $role }}Pool{{ $fleet.suffix }}
    ray_actor_options: {{ toJson $pool.actor }}
    {{- with $pool.bundles }}
    placement_group_bundles: {{ toJson . }}
    placement_group_strategy: {{ $pool.strategy }}
    {{- end }}
  {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Not empty: a pool of the endpoint follows its load. */}}
{{- define "baton.scales" -}}
{{- range append (default list .fleets) . -}}
{{- if and .groups .effective.scaling.enabled }}yes{{ end -}}
{{- end -}}
{{- end -}}

{{- define "baton.args" -}}
{{- $args := deepCopy (default (dict) .model.values.config) -}}
{{- $serve := default (dict) $args.serve -}}
{{- if not (hasKey $serve "host") -}}{{- $_ := set $serve "host" "0.0.0.0" -}}{{- end -}}
{{- range list "drain_notice_s" "schedulers" -}}{{- $_ := set $serve . (index $.model.effective.serve .) -}}{{- end -}}
{{- $_ := set $args "ingress_instances" (int .model.effective.ingress_instances) -}}
{{- if .root.Values.files.enabled -}}{{- $_ := set $serve "batch_dir" (printf "/files/%s" .model.name) -}}{{- end -}}
{{- if .root.Values.store.existingSecret -}}{{- $_ := set $serve "store_file" "/etc/baton/store/url" -}}{{- end -}}
{{- if .root.Values.apiKeys.enabled -}}{{- $_ := set $serve "api_keys_file" "/etc/baton/api-keys/api-keys" -}}{{- end -}}
{{- if .root.Values.ingressTls.existingSecret -}}
  {{- $tls := dict "tls_cert" "/etc/baton/ingress-tls/tls.crt" "tls_key" "/etc/baton/ingress-tls/tls.key" -}}
  {{- $serve = mergeOverwrite $serve $tls -}}
{{- end -}}
{{- if .root.Values.live -}}{{- $_ := set $serve "live_file" "/etc/baton/live/live.yaml" -}}{{- end -}}
{{- $_ := set $args "serve" $serve -}}
{{- if include "baton.clusterTlsSecret" .root -}}
  {{- $folder := "/etc/baton/cluster-tls" -}}
  {{- $tls := dict "tls" "files" "tls_cert" (printf "%s/tls.crt" $folder) "tls_key" (printf "%s/tls.key" $folder) "tls_ca" (printf "%s/ca.crt" $folder) -}}
  {{- $_ := set $args "security" (mergeOverwrite (default (dict) $args.security) $tls) -}}
{{- end -}}
{{- toYaml $args -}}
{{- end -}}
