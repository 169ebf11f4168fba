#include "server/ballastd/ballastd_flags.h"

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/available_memory.h"
#include "cpu_optimizer_service/common/system/credential_files.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "cpu_optimizer_service/common/text/amounts.h"
#include "cpu_optimizer_service/common/text/command_line.h"
#include "cpu_optimizer_service/host/state_directory.h"
#include "server/ballastd/config_check.h"
#include "server/holder/holder.h"

namespace ballast::server {
namespace {

// 11 days. Added to a clock's time, they do not overflow.
constexpr double kMostSeconds = 1e6;
constexpr char kAbout[] =
    "ballastd: the Ballast optimizer service\n\n"
    "A flag --drain-seconds=5 is also a line `drain-seconds = 5` of the --config file, and the "
    "variable\nBALLASTD_DRAIN_SECONDS. Defaults are in parentheses.\n";

// What flags say before it is looked into together.
struct Texts {
  std::string listen = "127.0.0.1:7070";
  std::string memory_limit;
  std::string checkpoint_every;
  int keep_asked = 0;
  std::string forget_after;
  std::string config;
  std::string user;
};

void AddFlags(BallastdFlags& flags, Texts& texts, CommandLine& line) {
  AccessOptions& access = flags.server.access;
  line.Group("Where it listens");
  line.Add(
      "listen", texts.listen,
      "Addresses to listen on, separated by commas: HOST:PORT or unix:/path. Port 0: the system "
      "chooses.");
  line.Add("advertise", flags.server.advertise,
           "HOST:PORT at which services on other hosts reach this one, for jobs that span hosts. "
           "Default: from --listen, its first address that other hosts can reach.");
  line.Add(
      "cluster", flags.server.cluster,
      "etcd://HOST:PORT,HOST:PORT/PREFIX: register in etcd, where trainers and tools find this "
      "service and its jobs by that address. Default: none.");
  line.Add("etcd-ca", flags.server.etcd.ca, "Use TLS to etcd, with this authority.");
  line.Add("etcd-cert", flags.server.etcd.cert, "This service's certificate for etcd.");
  line.Add("etcd-key", flags.server.etcd.key, "Its key. Other users must not be able to read it.");
  line.Add("etcd-user", flags.server.etcd.user, "This service's user in etcd.");
  line.Add("etcd-password-file", flags.server.etcd.password_file,
           "A file with that user's password. Other users must not be able to read it.");
  line.Add("insecure", flags.server.insecure,
           "Allow addresses that other hosts can reach without authentication. Every such host may "
           "do everything.");
  line.Add("metrics-listen", flags.status.listen,
           "Serve metrics, a status page, /live and /ready over HTTP here: PORT on loopback, or "
           "HOST:PORT, such as 127.0.0.1:7071. Port 0: the system chooses. With --tls-cert it uses "
           "TLS. Default: off.");
  line.Add("metrics-insecure", flags.status.allow_remote,
           "Allow --metrics-listen addresses that other hosts can reach without authentication. "
           "Every such host may look at all jobs.");
  line.Add("port-file", flags.port_file,
           "Write the addresses here, one a line, once the service listens.");
  line.Group("Who may do what");
  line.Add("tls-cert", access.tls_certificate,
           "Use TLS over TCP with this certificate, a PEM chain.");
  line.Add("tls-key", access.tls_key, "Its key. Other users must not be able to read it.");
  line.Add("tls-client-ca", access.tls_client_ca,
           "Request client certificates signed by these authorities.");
  line.Add("roles-file", access.roles,
           "Who may do what. A line is: ROLE JOBS PRINCIPAL, such as: trainer gpt-* token:ci. "
           "Roles are viewer, trainer and operator. Principals are cert:NAME, user:NAME, "
           "token:NAME or *. Without this file every caller is an operator of all jobs.");
  line.Add("tokens-file", access.tokens,
           "Tokens of clients. A line is: NAME SHA256. Other users must not be able to read it.");
  line.Add("allow-paths", flags.server.allow_paths,
           "Accept absolute paths in SaveJob and LoadJob from every caller. Without it, only over "
           "a unix socket to which only this user can connect.");
  line.Group("Memory and processors");
  line.Add("memory-limit", texts.memory_limit,
           "Memory for all jobs together: a number with B, KiB, MiB, GiB or TiB. Default: 80% of "
           "the free memory at start, of the machine or of the process's control groups, whichever "
           "is less.");
  line.Add("threads", flags.threads, 0, 4096,
           "Threads for updates. 0: one for each usable processor, by affinity mask and CPU quota "
           "of control groups (rounded up).");
  line.Add("shared-memory", flags.server.shared_memory, {{"auto", true}, {"never", false}},
           "auto: workers on this host share memory with the service if they request it. never: "
           "they do not.");
  line.Add("state-dir", flags.state_directory,
           "Keep all memory of jobs as files in this directory, on a tmpfs or hugetlbfs. Jobs then "
           "survive the end of all the service's processes, for example a container's restart. The "
           "directory is created, for this user only, if its parent exists. Empty: see --holder.");
  line.Add("holder", flags.has_holder, {{"parent", true}, {"none", false}},
           "What keeps the memory of jobs if the service's process crashes. parent: a process that "
           "starts the service as its child, and restarts it after a crash. none: jobs are lost.");
  line.Add("most-deaths", flags.most_deaths, 0, std::numeric_limits<int>::max(),
           "The parent gives up after so many crashes in a row of processes that served less than "
           "five seconds. 0: never.");
  line.Group("Training and checkpoints");
  line.Add("seal-deadline-seconds", flags.server.seal_deadline_seconds, 0.0, kMostSeconds,
           "When a step's first seal is this old, the service tells sealed ranks which ranks they "
           "wait for.");
  line.Add("checkpoint-dir", flags.checkpoint_directory,
           "Where jobs are saved, in folders DIR/JOB/step-STEP.GENERATION: when the service stops, "
           "every --checkpoint-every, and on request (`ballast save`). `ballast save` and `ballast "
           "load` take names in it.");
  line.Add(
      "checkpoint-every", texts.checkpoint_every,
      "Save every job regularly, while steps go on: 1000steps, 90s, 10min or 2h, or two of these "
      "separated by a comma. Needs --checkpoint-dir. Empty: only at the stop and on request.");
  line.Add("checkpoint-keep", flags.checkpoint_policy.keep, 1, 1000,
           "How many scheduled checkpoints of a job stay: the newest. Those of other jobs of the "
           "same name are never deleted.");
  line.Add("checkpoint-keep-asked", texts.keep_asked, 0, 1000,
           "The same for requested checkpoints (`ballast save`, a trainer's state_dict()). 0: all, "
           "until `ballast delete-checkpoint`. A limit may delete a checkpoint that a trainer's "
           "own checkpoint needs.");
  line.Add("forget-after", texts.forget_after,
           "Save and close a job without attached ranks after so long: 90s, 10min or 2h. To go on, "
           "resume from that checkpoint (--resume). Choose more than the minute for which workers "
           "try to reconnect. Needs --checkpoint-dir. Empty: jobs stay until they are closed.");
  // Under the ten seconds after which container runtimes kill, with room for a save.
  line.Add("drain-seconds", flags.drain_seconds, 0.0, kMostSeconds,
           "When the service stops, how long steps in progress may take to end. The saves after "
           "that are not bounded.");
  line.Group("The process itself");
  line.Add("config", texts.config,
           "A file with flags: lines of KEY = VALUE. The environment (BALLASTD_THREADS for "
           "--threads) overrides it, and this command line overrides both.");
  line.Add("check-config", flags.check_config, "Check the flags and their files, and exit.");
  line.Add("user", texts.user,
           "With --check-config as root: check as this user, by name or number, because root can "
           "read and write everything. Default: the user ballast, if it exists.");
  line.Add(
      "upgrade", flags.upgrade,
      "Upgrade the service with this process id (the parent's) to the program that is now on disk, "
      "and make it read its configuration again. No state is lost. If the program or the "
      "configuration is unfit, nothing changes. Waits until the service serves, and exits.");
  line.Add("check-state", flags.check_state,
           "Say whether this ballastd can take over the state of the service with this process id "
           "(the parent's), and exit with 0 or 2.");
  line.Add("log-level", flags.log_level,
           "debug, info, warning, error or off. Audit lines are written at every level.")
      ->check(CLI::IsMember({"debug", "info", "warning", "error", "off"}));
  line.Add("log-format", flags.log_format, {{"text", LogFormat::kText}, {"json", LogFormat::kJson}},
           "text, or json: one object a line, with time, level, message, and the job if the line "
           "has one. If standard error is systemd's journal, lines begin with its priorities.");
  line.Add("startup-benchmark", flags.startup_benchmark,
           "At start, run a short self-benchmark and log it, with what makes the host slow.");
  line.Add(
      "self-benchmark", flags.self_benchmark,
      "Measure how fast this host updates, relative to its memory bandwidth, print it and exit.");
}

absl::StatusOr<int64_t> ParseMemoryLimit(const std::string& text) {
  if (text.empty()) return DefaultMemoryLimitBytes();
  absl::StatusOr<int64_t> bytes = ParseBytes(text);
  return bytes.ok() ? bytes : Annotate(bytes.status(), "flag --memory-limit");
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
        "flag --forget-after needs a directory to save to; give --checkpoint-dir as well");
  }
  return parsed.every_seconds;
}

absl::Status ParseCheckpointEvery(const std::string& every, const std::string& directory,
                                  CheckpointPolicy& policy) {
  if (every.empty()) return absl::OkStatus();
  if (directory.empty()) {
    return absl::InvalidArgumentError(
        "flag --checkpoint-every needs a directory to save to; give --checkpoint-dir as well");
  }
  for (const absl::string_view part : absl::StrSplit(every, ',')) {
    BALLAST_RETURN_IF_ERROR(Annotate(ParseInterval(part, policy), "flag --checkpoint-every"));
  }
  return absl::OkStatus();
}

// Looks into what the flags say together.
absl::Status Check(BallastdFlags& flags, const Texts& texts) {
  // A program that is tried has the service's own arguments, and this one behind them
  // (holder_table.h): all of them are checked.
  const bool is_of_trial = flags.check_state == kHeldState;
  // These ask for the process id alone: files that are meant for a service cannot make them fail.
  if (!flags.upgrade.empty() || (!flags.check_state.empty() && !is_of_trial)) {
    return absl::OkStatus();
  }
  if (texts.keep_asked > 0) flags.checkpoint_policy.keep_asked = texts.keep_asked;
  BALLAST_RETURN_IF_ERROR(ParseCheckpointEvery(texts.checkpoint_every, flags.checkpoint_directory,
                                               flags.checkpoint_policy));
  BALLAST_ASSIGN_OR_RETURN(flags.forget_after_seconds,
                           ParseForgetAfter(texts.forget_after, flags.checkpoint_directory));
  flags.status.access = flags.server.access;
  BALLAST_ASSIGN_OR_RETURN(flags.memory_limit_bytes, ParseMemoryLimit(texts.memory_limit));
  flags.memory_limit_is_default = texts.memory_limit.empty();
  if (!flags.state_directory.empty()) {
    BALLAST_RETURN_IF_ERROR(
        Annotate(StateDirectory::Check(flags.state_directory), "flag --state-dir"));
  }
  flags.server.listen = absl::StrSplit(texts.listen, ',', absl::SkipEmpty());
  if (flags.server.listen.empty()) {
    return absl::InvalidArgumentError("flag --listen: give at least one address");
  }
  // A process that may find jobs is not refused because a token has been revoked meanwhile.
  const bool is_new = !IsHeld() && flags.state_directory.empty();
  BALLAST_RETURN_IF_ERROR(Server::Check(flags.server, is_new));
  if (flags.status.listen.empty()) return absl::OkStatus();
  return Annotate(HttpServer::ParseListen(flags.status).status(),
                  "flag --metrics-listen=" + flags.status.listen);
}

// The same as the user that the service runs as.
absl::Status CheckAsUser(BallastdFlags& flags, const Texts& texts) {
  BALLAST_ASSIGN_OR_RETURN(flags.checked_as, BecomeUser(texts.user));
  absl::Status status = Check(flags, texts);
  // Until now another user has read it.
  if (!flags.checked_as.empty() && !texts.config.empty()) {
    status.Update(ReadCredentialFile(texts.config, Others::kMayRead).status());
  }
  if (status.ok()) status.Update(CheckPlaces(flags));
  return flags.checked_as.empty() ? status : Annotate(status, "as the user " + flags.checked_as);
}

}  // namespace

absl::StatusOr<BallastdFlags> ParseBallastdFlags(int argc, char** argv) {
  BallastdFlags flags;
  Texts texts;
  CommandLine line("ballastd", kAbout, VersionAndBuild());
  AddFlags(flags, texts, line);
  const std::vector<std::string> words(argv + 1, argv + argc);
  // For the file's name, which the environment may say, too.
  BALLAST_ASSIGN_OR_RETURN(const std::string answer, line.Parse(words));
  if (!answer.empty()) {
    std::fputs(answer.c_str(), stdout);
    std::exit(0);
  }
  const char* const config = std::getenv("BALLASTD_CONFIG");
  if (!line.Has("config") && config != nullptr) texts.config = config;
  // The last one that sets a flag counts. A bad value is found wherever it stands.
  if (!texts.config.empty()) BALLAST_RETURN_IF_ERROR(line.ReadFile(texts.config));
  BALLAST_RETURN_IF_ERROR(line.ReadEnvironment("BALLASTD_"));
  BALLAST_RETURN_IF_ERROR(line.Parse(words).status());
  flags.settings = line.values();
  if (!flags.check_config && !texts.user.empty()) {
    return absl::InvalidArgumentError(
        "flag --user is only for --check-config; start the service as that user");
  }
  BALLAST_RETURN_IF_ERROR(flags.check_config ? CheckAsUser(flags, texts) : Check(flags, texts));
  return flags;
}

}  // namespace ballast::server
