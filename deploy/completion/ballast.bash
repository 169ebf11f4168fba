# bash completion of ballast. Made by: ballast completion bash
_ballast() {
  COMPREPLY=()
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
  # Of --flag=VALUE the shell makes three words.
  if [[ $word == = ]]; then word=''; elif [[ $before == = ]]; then before=${COMP_WORDS[COMP_CWORD - 2]}; fi
  local commands="jobs job history groups state trace set-group save load import export checkpoints verify abort-step undo close plan doctor completion"
  local files=" --out --tls-ca --tls-cert --tls-key --token-file " values=" --beta1 --beta2 --bias-correction --decoupled-weight-decay --dtype --eps --file-gb --lr --maximize --memory --plane --service --steps --timeout --wait --weight-decay --world-size "
  local flags='' places=() place=0 i
  if ((COMP_CWORD == 1)); then
    mapfile -t COMPREPLY < <(compgen -W "$commands help --help --version" -- "$word")
    return
  fi
  case ${COMP_WORDS[1]} in
    jobs) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=() ;;
    job) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    history) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    groups) flags="--history --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    state) flags="--plane --out --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB PARAMETER) ;;
    trace) flags="--steps --out --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    set-group) flags="--lr --beta1 --beta2 --eps --weight-decay --decoupled-weight-decay --bias-correction --maximize --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB GROUP) ;;
    save) flags="--background --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB DIR) ;;
    load) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB DIR) ;;
    import) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB DIR) ;;
    export) flags="--dtype --file-gb --json --help" places=(CHECKPOINT DIR) ;;
    checkpoints) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(DIR) ;;
    verify) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(DIR) ;;
    abort-step) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    undo) flags="--json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    close) flags="--force --json --help --service --tls-ca --tls-cert --tls-key --token-file --timeout --wait" places=(JOB) ;;
    plan) flags="--memory --world-size --json --help" places=(SPEC) ;;
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
  for ((i = 2; i < COMP_CWORD; ++i)); do
    if [[ $files$values == *" ${COMP_WORDS[i]} "* ]]; then
      ((i += 1))
      if [[ ${COMP_WORDS[i]} == = ]]; then ((i += 1)); fi
    elif [[ ${COMP_WORDS[i]} != -* ]]; then
      ((place += 1))
    fi
  done
  case ${places[place]-} in
    JOB) mapfile -t COMPREPLY < <(compgen -W "$("${COMP_WORDS[0]}" jobs --json --timeout=2 2>/dev/null | sed -n 's/^ *"name": "\(.*\)",$/\1/p')" -- "$word") ;;
    COMMAND) mapfile -t COMPREPLY < <(compgen -W "$commands" -- "$word") ;;
    SHELL) mapfile -t COMPREPLY < <(compgen -W "bash zsh" -- "$word") ;;
    DIR | CHECKPOINT | SPEC) mapfile -t COMPREPLY < <(compgen -f -- "$word") ;;
  esac
}
complete -o filenames -F _ballast ballast
