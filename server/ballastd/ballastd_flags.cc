#include "server/ballastd/ballastd_flags.h"

#include <cmath>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/available_memory.h"
#include "cpu_optimizer_service/common/system/credential_files.h"
#include "cpu_optimizer_service/common/text/amounts.h"
#include "cpu_optimizer_service/host/state_directory.h"
#include "server/ballastd/config_check.h"
#include "server/ballastd/flag_sources.h"
#include "server/holder/holder.h"

ABSL_FLAG(
    std::vector<std::string>, listen, {"127.0.0.1:7070"},
    "Addresses to listen on, separated by commas: HOST:PORT or unix:/path. Port 0: the system "
    "chooses.");
ABSL_FLAG(
    bool, insecure, false,
    "Allow addresses that other hosts can reach, although every host that does may do everything.");
ABSL_FLAG(std::string, tls_cert, "",
          "Speak TLS over TCP with this certificate, a chain in the form of PEM.");
ABSL_FLAG(std::string, tls_key, "", "Its key, which other users may not read.");
ABSL_FLAG(std::string, tls_client_ca, "",
          "Ask clients for a certificate that these authorities have signed.");
ABSL_FLAG(std::string, roles_file, "",
          "Who may do what. A line is: ROLE JOBS PRINCIPAL, such as: trainer gpt-* token:ci. Roles "
          "are viewer, trainer and operator; principals cert:NAME, user:NAME, token:NAME or *. "
          "Without it every caller is an operator of all jobs.");
ABSL_FLAG(std::string, tokens_file, "",
          "Tokens of clients. A line is: NAME SHA256. Other users may not read it.");
// Read before the others (flag_sources.h).
ABSL_FLAG(
    std::string, config, "",
    "A file with flags: lines of KEY = VALUE. The environment (BALLASTD_THREADS for --threads) "
    "and this command line come before it.");
ABSL_FLAG(bool, check_config, false, "Check the flags and the files that they name, and exit.");
ABSL_FLAG(std::string, user, "",
          "The user, by name or number, that root checks as with --check-config, because root may "
          "read and write everything. Default: the user ballast, if there is one.");
ABSL_FLAG(
    std::string, upgrade, "",
    "Have the service of this process id, the parent's, go on with the program that is on disk by "
    "now, and read its configuration again; nothing is lost, and where the program or the "
    "configuration would not do, nothing changes. Waits until it serves, and exits.");
ABSL_FLAG(std::string, check_state, "",
          "Say whether this ballastd could take over what the service of this process id, the "
          "parent's, keeps, and exit, with 0 or 2.");
ABSL_FLAG(std::string, memory_limit, "",
          "Memory for all jobs together: a number with B, KiB, MiB, GiB or TiB. Default: 80% of "
          "what the machine has left at start, or the process's control groups if that is less.");
ABSL_FLAG(
    int, threads, 0,
    "Threads for updates; 0: one for each processor that the process may use, by its affinity "
    "mask and the CPU quota of its control groups (rounded up).");
ABSL_FLAG(std::string, log_level, "info",
          "debug, info, warning, error or off. Lines of the audit are written at each of them.");
ABSL_FLAG(
    std::string, log_format, "text",
    "text, or json: one object a line, with time, level, message, and job where there is one. "
    "Where standard error is systemd's journal, lines have its priorities in front.");
ABSL_FLAG(
    double, seal_deadline_seconds, 60,
    "When a step's first seal is this old, sealed ranks are notified which ranks they wait for.");
ABSL_FLAG(std::string, checkpoint_dir, "",
          "Where jobs are saved, each in folders DIR/JOB/step-STEP.GENERATION: when the service "
          "stops, as --checkpoint-every says, and on request (`ballast save`). Names that `ballast "
          "save` and `ballast load` are given lead there.");
ABSL_FLAG(std::string, checkpoint_every, "",
          "Save every job by itself, while steps go on: 1000steps, 90s, 10min or 2h, or two with a "
          "comma between them. Needs --checkpoint-dir. Empty: only when it stops and on request.");
ABSL_FLAG(
    int, checkpoint_keep, ballast::kDefaultKeptCheckpoints,
    "How many checkpoints of a job stay of those that the service makes by itself: the newest. "
    "Those of other jobs of the same name are never deleted.");
ABSL_FLAG(int, checkpoint_keep_asked, 0,
          "The same of those that were asked for (`ballast save`, the state_dict() of a trainer). "
          "0: all, until `ballast delete-checkpoint`. A limit may delete what a trainer's own "
          "checkpoint needs.");
ABSL_FLAG(
    std::string, forget_after, "",
    "Save and close a job that no rank has had for so long: 90s, 10min or 2h. It goes on from "
    "that checkpoint (--resume). Longer than workers try to reconnect, a minute. Needs "
    "--checkpoint-dir. Empty: jobs stay until they are closed.");
ABSL_FLAG(bool, allow_paths, false,
          "Take absolute paths in SaveJob and LoadJob from every caller. Without it, only over a "
          "unix socket to which only this user can connect.");
// Under the ten seconds after which container runtimes kill, with room for a save.
ABSL_FLAG(double, drain_seconds, 5,
          "When the service stops, how long steps in progress may take to end. Saving comes after "
          "that, and is not bounded.");
ABSL_FLAG(std::string, shared_memory, "auto",
          "auto: workers on this host share memory with the service where they ask for it; never.");
ABSL_FLAG(std::string, port_file, "",
          "Write the addresses here, one a line, once the service listens.");
ABSL_FLAG(
    std::string, state_dir, "",
    "Keep all memory of jobs as files in this directory, on a tmpfs or hugetlbfs, so that they "
    "outlive all processes of the service, as when a container is restarted. It is made, for "
    "this user alone, if its parent directory is there. Empty: what --holder says.");
ABSL_FLAG(std::string, holder, "parent",
          "What holds the memory of jobs when the service's process dies. parent: a process that "
          "starts the service as its child, and again when that dies; none: nothing does.");
ABSL_FLAG(int, most_deaths, 12,
          "So many deaths of the service's process in a row, none of one that had served for five "
          "seconds, and it is not started again. 0: however many.");
ABSL_FLAG(std::string, metrics_listen, "",
          "Serve metrics, a status page and /live and /ready over HTTP here: PORT of this host "
          "alone, or HOST:PORT, such as 127.0.0.1:7071. Port 0: the system chooses. With "
          "--tls-cert it speaks TLS. Default: not.");
ABSL_FLAG(bool, metrics_insecure, false,
          "Allow --metrics-listen addresses that other hosts can reach without saying who they "
          "are: every host that does may look at all jobs.");
ABSL_FLAG(bool, self_benchmark, false,
          "Measure how fast this host updates against what its memory allows, print it and exit.");
ABSL_FLAG(bool, startup_benchmark, true,
          "Measure the same briefly at start, and log it with what makes the host slow.");

namespace ballast::server {
namespace {

absl::StatusOr<int64_t> ParseMemoryLimit(const std::string& text) {
  if (text.empty()) return DefaultMemoryLimitBytes();
  absl::StatusOr<int64_t> bytes = ParseBytes(text);
  return bytes.ok() ? bytes : Annotate(bytes.status(), "flag --memory-limit");
}

absl::Status CheckSeconds(absl::string_view flag, double seconds) {
  // NaN is refused, too. A million seconds, 11 days, added to a clock's time do not overflow.
  if (seconds >= 0 && seconds <= 1e6) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("flag --", flag, ": ", seconds, " is not between 0 and 1000000 seconds"));
}

// One of "1000steps" and "10min" into what it says.
absl::Status ParseInterval(absl::string_view text, CheckpointPolicy& policy) {
  // They are tried in this order: "steps" ends with an s, too, so it comes before the seconds.
  constexpr struct {
    const char* suffix;
    double seconds;
  } kUnits[] = {{"steps", 0}, {"s", 1}, {"min", 60}, {"h", 3600}};
  for (const auto& unit : kUnits) {
    absl::string_view number = text;
    if (!absl::ConsumeSuffix(&number, unit.suffix)) continue;
    int64_t value = 0;
    if (!absl::SimpleAtoi(number, &value) || value < 1 || value > 1'000'000'000) break;
    const bool steps = unit.seconds == 0;
    if (steps ? policy.every_steps > 0 : policy.every_seconds > 0) break;  // Said twice.
    if (steps) policy.every_steps = static_cast<uint64_t>(value);
    if (!steps) policy.every_seconds = static_cast<double>(value) * unit.seconds;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "' is no interval; give such as 1000steps, 90s, 10min or 2h"));
}

absl::StatusOr<double> ParseForgetAfter(const std::string& text, const std::string& directory) {
  if (text.empty()) return 0;
  CheckpointPolicy parsed;
  if (!ParseInterval(text, parsed).ok() || parsed.every_seconds == 0) {
    return absl::InvalidArgumentError(absl::StrCat("flag --forget-after: '", text,
                                                   "' is no time; give such as 90s, 10min or 2h"));
  }
  if (directory.empty()) {
    return absl::InvalidArgumentError(
        "flag --forget-after: there is no place to save to; give --checkpoint-dir, too");
  }
  return parsed.every_seconds;
}

absl::StatusOr<CheckpointPolicy> ParseCheckpointPolicy(const std::string& directory,
                                                       const std::string& every, int keep,
                                                       int keep_asked) {
  CheckpointPolicy policy = {.keep = keep};
  if (keep_asked > 0) policy.keep_asked = keep_asked;
  if (keep_asked < 0 || keep_asked > 1000) {
    return absl::InvalidArgumentError(absl::StrCat("flag --checkpoint-keep-asked: ", keep_asked,
                                                   " is not between 0, for all, and 1000"));
  }
  if (keep < 1 || keep > 1000) {
    return absl::InvalidArgumentError(
        absl::StrCat("flag --checkpoint-keep: ", keep, " is not between 1 and 1000"));
  }
  if (every.empty()) return policy;
  if (directory.empty()) {
    return absl::InvalidArgumentError(
        "flag --checkpoint-every: there is no place to save to; give --checkpoint-dir, too");
  }
  for (const absl::string_view part : absl::StrSplit(every, ',')) {
    BALLAST_RETURN_IF_ERROR(Annotate(ParseInterval(part, policy), "flag --checkpoint-every"));
  }
  return policy;
}

absl::StatusOr<bool> ParseSharedMemory(const std::string& text) {
  if (text == "auto" || text == "never") return text == "auto";
  return absl::InvalidArgumentError(
      absl::StrCat("flag --shared-memory: '", text, "' is neither auto nor never"));
}

absl::StatusOr<bool> ParseHolder(const std::string& text) {
  if (text == "parent" || text == "none") return text == "parent";
  return absl::InvalidArgumentError(
      absl::StrCat("flag --holder: '", text, "' is neither parent nor none"));
}

absl::Status CheckLogLevel(const std::string& level) {
  for (const char* known : {"debug", "info", "warning", "error", "off"}) {
    if (level == known) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("flag --log-level: '", level, "' is none of debug, info, warning, error, off"));
}

// What the flags are set to.
absl::StatusOr<BallastdFlags> TakeFlags() {
  BallastdFlags flags;
  flags.upgrade = absl::GetFlag(FLAGS_upgrade);
  flags.check_state = absl::GetFlag(FLAGS_check_state);
  // A program that is tried has the service's own arguments, and this one behind them
  // (holder_table.h): all of them are checked.
  const bool is_of_trial = flags.check_state == kHeldState;
  // These ask for the process id alone: flags and files that are meant for a service cannot make
  // them fail.
  if (!flags.upgrade.empty() || (!flags.check_state.empty() && !is_of_trial)) return flags;
  flags.server.listen = absl::GetFlag(FLAGS_listen);
  flags.server.insecure = absl::GetFlag(FLAGS_insecure);
  flags.server.access = {.tls_certificate = absl::GetFlag(FLAGS_tls_cert),
                         .tls_key = absl::GetFlag(FLAGS_tls_key),
                         .tls_client_ca = absl::GetFlag(FLAGS_tls_client_ca),
                         .roles = absl::GetFlag(FLAGS_roles_file),
                         .tokens = absl::GetFlag(FLAGS_tokens_file)};
  flags.check_config = absl::GetFlag(FLAGS_check_config);
  flags.server.seal_deadline_seconds = absl::GetFlag(FLAGS_seal_deadline_seconds);
  flags.threads = absl::GetFlag(FLAGS_threads);
  flags.log_level = absl::GetFlag(FLAGS_log_level);
  const std::string log_format = absl::GetFlag(FLAGS_log_format);
  if (log_format != "text" && log_format != "json") {
    return absl::InvalidArgumentError(
        absl::StrCat("flag --log-format: '", log_format, "' is none of text, json"));
  }
  flags.log_format = log_format == "json" ? LogFormat::kJson : LogFormat::kText;
  flags.checkpoint_directory = absl::GetFlag(FLAGS_checkpoint_dir);
  BALLAST_ASSIGN_OR_RETURN(
      flags.checkpoint_policy,
      ParseCheckpointPolicy(flags.checkpoint_directory, absl::GetFlag(FLAGS_checkpoint_every),
                            absl::GetFlag(FLAGS_checkpoint_keep),
                            absl::GetFlag(FLAGS_checkpoint_keep_asked)));
  BALLAST_ASSIGN_OR_RETURN(
      flags.forget_after_seconds,
      ParseForgetAfter(absl::GetFlag(FLAGS_forget_after), flags.checkpoint_directory));
  flags.server.allow_paths = absl::GetFlag(FLAGS_allow_paths);
  flags.drain_seconds = absl::GetFlag(FLAGS_drain_seconds);
  flags.port_file = absl::GetFlag(FLAGS_port_file);
  flags.settings = FlagValues();
  flags.status.listen = absl::GetFlag(FLAGS_metrics_listen);
  flags.status.allow_remote = absl::GetFlag(FLAGS_metrics_insecure);
  flags.status.access = flags.server.access;
  flags.self_benchmark = absl::GetFlag(FLAGS_self_benchmark);
  flags.startup_benchmark = absl::GetFlag(FLAGS_startup_benchmark);
  BALLAST_ASSIGN_OR_RETURN(flags.memory_limit_bytes,
                           ParseMemoryLimit(absl::GetFlag(FLAGS_memory_limit)));
  flags.memory_limit_is_default = absl::GetFlag(FLAGS_memory_limit).empty();
  flags.state_directory = absl::GetFlag(FLAGS_state_dir);
  if (!flags.state_directory.empty()) {
    BALLAST_RETURN_IF_ERROR(
        Annotate(StateDirectory::Check(flags.state_directory), "flag --state-dir"));
  }
  flags.most_deaths = absl::GetFlag(FLAGS_most_deaths);
  BALLAST_ASSIGN_OR_RETURN(flags.has_holder, ParseHolder(absl::GetFlag(FLAGS_holder)));
  BALLAST_ASSIGN_OR_RETURN(flags.server.shared_memory,
                           ParseSharedMemory(absl::GetFlag(FLAGS_shared_memory)));
  BALLAST_RETURN_IF_ERROR(CheckSeconds("drain-seconds", flags.drain_seconds));
  BALLAST_RETURN_IF_ERROR(
      CheckSeconds("seal-deadline-seconds", flags.server.seal_deadline_seconds));
  BALLAST_RETURN_IF_ERROR(CheckLogLevel(flags.log_level));
  if (flags.server.listen.empty()) {
    return absl::InvalidArgumentError("flag --listen: give at least one address");
  }
  if (flags.most_deaths < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("flag --most-deaths: ", flags.most_deaths, " is negative"));
  }
  if (flags.threads < 0 || flags.threads > 4096) {
    return absl::InvalidArgumentError(
        absl::StrCat("flag --threads: ", flags.threads, " is not between 0 and 4096"));
  }
  // A process that may find jobs is not refused because a token has been revoked meanwhile.
  const bool is_new = !IsHeld() && flags.state_directory.empty();
  BALLAST_RETURN_IF_ERROR(Server::Check(flags.server, is_new));
  if (!flags.status.listen.empty()) {
    BALLAST_RETURN_IF_ERROR(Annotate(HttpServer::ParseListen(flags.status).status(),
                                     "flag --metrics-listen=" + flags.status.listen));
  }
  return flags;
}

// As the user that the service runs as.
absl::StatusOr<BallastdFlags> CheckFlags() {
  BALLAST_ASSIGN_OR_RETURN(const std::string user, BecomeUser(absl::GetFlag(FLAGS_user)));
  absl::StatusOr<BallastdFlags> flags = TakeFlags();
  absl::Status status = flags.status();
  // Until now another user has read it.
  if (const std::string config = absl::GetFlag(FLAGS_config); !user.empty() && !config.empty()) {
    status.Update(ReadCredentialFile(config, Others::kMayRead).status());
  }
  if (status.ok()) status.Update(CheckPlaces(*flags));
  if (!status.ok()) return user.empty() ? status : Annotate(status, "as the user " + user);
  flags->checked_as = user;
  return flags;
}

}  // namespace

absl::StatusOr<BallastdFlags> ParseBallastdFlags(int argc, char** argv) {
  BALLAST_RETURN_IF_ERROR(SetFlags({argv, argv + argc}));
  if (absl::GetFlag(FLAGS_check_config)) return CheckFlags();
  if (!absl::GetFlag(FLAGS_user).empty()) {
    return absl::InvalidArgumentError(
        "flag --user: only with --check-config; start the service as that user");
  }
  return TakeFlags();
}

}  // namespace ballast::server
