# shellcheck shell=bash
# For the scripts that pack programs with the shared libraries that they need. Sourced; calls fail MESSAGE.

# What belongs to the machine that the programs run on.
machines='^(linux-vdso|ld-linux.*|libc|libm|libdl|libpthread|librt|libresolv|libutil|libanl|libnss_.*|libcuda|libnvidia.*|libcublas.*|libcudart|libnccl)\.so'

# libraries_of PROGRAM...: every library that a program needs, and those that these need, by the name that they
# ask for, into the array `libraries`: name to path.
declare -A libraries=()
libraries_of() {
  local program library path
  for program in "$@"; do
    while read -r library _ path _; do
      [[ ! $library =~ $machines ]] || continue
      [[ $path == /* ]] || fail "$program needs $library, which is not on this machine; install it"
      libraries[$library]=$path
    done < <(ldd "$program" | grep '=>')
  done
}

# licenses_to FOLDER: under what terms `libraries` may be passed on, where the system says it.
licenses_to() {
  local library package patterns=()
  for library in "${!libraries[@]}"; do
    patterns+=("*/$(basename "$(readlink -f "${libraries[$library]}")")")
  done
  while read -r package; do
    [[ ! -r /usr/share/doc/$package/copyright ]] ||
      cp "/usr/share/doc/$package/copyright" "$1/$package"
  done < <(dpkg-query --search "${patterns[@]}" 2>/dev/null | cut -d: -f1 | sort -u)
}
