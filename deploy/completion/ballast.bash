# bash completion of ballast. Made by: ballast completion bash
_ballast() {
  COMPREPLY=()
  # The shell cuts at ':', as in HOST:PORT, which is put together again.
  local words=() i
  for ((i = 0; i <= COMP_CWORD; ++i)); do
    if ((i > 1)) && [[ ${COMP_WORDS[i]} == :* || ${COMP_WORDS[i - 1]} == *: ]]; then
      words[-1]+=${COMP_WORDS[i]}
    else
      words+=("${COMP_WORDS[i]}")
    fi
  done
  local at=$((${#words[@]} - 1)) word=${COMP_WORDS[COMP_CWORD]}
  local before=${words[at - 1]}
  # Of --flag=VALUE it makes three words.
  if [[ $word == = ]]; then word=''; elif [[ $before == = ]]; then before=${words[at - 2]}; fi
  local commands="jobs job history groups state write-state trace set-group save load import export checkpoints verify delete-checkpoint abort-step undo close restore plan doctor completion"
  local files=" --out --tls-ca --tls-cert --tls-key --token-file " values=" --beta1 --beta2 --bias-correction --dampening --decoupled-weight-decay --dtype --eps --file-gb --lr --lr-decay --match-rms-adamw --maximize --members --memory --momentum --nesterov --ns-a --ns-b --ns-c --ns-steps --plane --service --steps --timeout --uid --wait --weight-decay --world-size "
  local flags='' places=() place=0 flag ask=("${words[0]}" jobs --json --timeout=2)
  if ((at == 1)); then
    mapfile -t COMPREPLY < <(compgen -W "$commands help --help --version" -- "$word")
    return
  fi
  case ${words[1]} in
    jobs) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=() ;;
    job) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    history) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    groups) flags="--history --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    state) flags="--plane --out --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB PARAMETER) ;;
    write-state) flags="--plane --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB PARAMETER FILE.npy) ;;
    trace) flags="--steps --out --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    set-group) flags="--lr --beta1 --beta2 --eps --weight-decay --decoupled-weight-decay --bias-correction --momentum --dampening --nesterov --lr-decay --ns-steps --ns-a --ns-b --ns-c --match-rms-adamw --maximize --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB GROUP) ;;
    save) flags="--background --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB DIR) ;;
    load) flags="--convert-state --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB DIR) ;;
    import) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB DIR) ;;
    export) flags="--dtype --file-gb --json --help" places=(CHECKPOINT DIR) ;;
    checkpoints) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(DIR) ;;
    verify) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(DIR) ;;
    delete-checkpoint) flags="--uid --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(CHECKPOINT) ;;
    abort-step) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    undo) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    close) flags="--force --here --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    restore) flags="--force --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    plan) flags="--members --memory --world-size --json --help" places=(SPEC) ;;
    doctor) flags="--out --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    completion) flags="--json --help" places=(SHELL) ;;
    help) places=(COMMAND) ;;
  esac
  if [[ $files == *" $before "* ]]; then
    mapfile -t COMPREPLY < <(compgen -f -- "$word")
    return
  fi
  if [[ $values == *" $before "* ]]; then return; fi
  if [[ $word == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$word")
    return
  fi
  for ((i = 2; i < at; ++i)); do
    flag=${words[i]}
    if [[ $files$values == *" $flag "* ]]; then
      ((i += 1))
      if [[ ${words[i]} == = ]]; then ((i += 1)); fi
      case $flag in --service | --tls-* | --token-file) ask+=("$flag=${words[i]}") ;; esac
    elif [[ $flag != -* ]]; then
      ((place += 1))
    fi
  done
  case ${places[place]-} in
    JOB) mapfile -t COMPREPLY < <(compgen -W "$("${ask[@]}" 2>/dev/null | sed -n 's/^ *"name": "jobs\/\([A-Za-z0-9._-]*\)",$/\1/p')" -- "$word") ;;
    COMMAND) mapfile -t COMPREPLY < <(compgen -W "$commands" -- "$word") ;;
    SHELL) mapfile -t COMPREPLY < <(compgen -W "bash zsh" -- "$word") ;;
    DIR | CHECKPOINT | SPEC) mapfile -t COMPREPLY < <(compgen -f -- "$word") ;;
  esac
}
complete -o filenames -F _ballast ballast
