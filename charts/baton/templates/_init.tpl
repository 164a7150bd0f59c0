{{/* The configuration of the endpoint that a model or a fleet belongs to, in its pods. */}}
{{- define "baton.configFile" -}}
/etc/baton/config/{{ default .name .application }}.yaml
{{- end -}}

{{/* Which row or group of the table there, as a part of a command; empty without a table. */}}
{{- define "baton.rowOption" -}}
{{- if .application }}{{ printf "--model=%s" .name | quote }}, {{ end -}}
{{- end -}}

{{/* Memory, limits, RDMA ports, GPUs and the links between them: a pod that is not fit never becomes ready. */}}
{{- define "baton.doctorContainer" -}}
- name: doctor
  {{- include "baton.container" . | nindent 2 }}
  command: [baton, doctor, --config, {{ include "baton.configFile" .model }}, {{ include "baton.rowOption" .model }}--instances, {{ .pool.perPod | quote }}, --pool, {{ .kind }}
    {{- if .pool.shares }}, --pool, prefill{{ end }}]
{{- end -}}

{{/* The model is on its volume, whole. */}}
{{- define "baton.waitContainer" -}}
- name: model
  image: {{ include "baton.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  securityContext:
    {{- include "baton.containerSecurity" (dict) | nindent 4 }}
  command: [python, -m, cluster.deploy.kube.model_files, wait, --volume=/models,
    --config={{ include "baton.configFile" .model }}, {{ include "baton.rowOption" .model }}--timeout-s={{ .root.Values.modelCache.fetch.timeoutSeconds }}]
  resources:
    requests: {cpu: 50m, memory: 256Mi, ephemeral-storage: 64Mi}
    limits: {memory: 512Mi, ephemeral-storage: 64Mi}
  volumeMounts:
    - {name: models, mountPath: /models, readOnly: true}
    - {name: config, mountPath: /etc/baton/config, readOnly: true}
    - {name: tmp, mountPath: /tmp}
{{- end -}}

{{/* Ray's head answers: without it a worker would end and be started again. */}}
{{- define "baton.headContainer" -}}
- name: head
  image: {{ include "baton.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  securityContext:
    {{- include "baton.containerSecurity" (dict) | nindent 4 }}
  command: [sh, -c, "until ray health-check --address {{ include "baton.fullname" .root }}-head-svc:6379; do sleep 3; done"]
  env:
    {{- include "baton.rayToken" .root | nindent 4 }}
  resources:
    requests: {cpu: 50m, memory: 256Mi, ephemeral-storage: 64Mi}
    limits: {memory: 1Gi, ephemeral-storage: 256Mi}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
{{- end -}}
