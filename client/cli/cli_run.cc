#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "client/calls/service.h"
#include "client/cli/cli_command.h"
#include "client/cli/cli_text.h"
#include "client/default_service.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "cpu_optimizer_service/common/text/printable.h"
#include "cpu_optimizer_service/common/text/suggestions.h"

namespace ballast::client::cli {
namespace {

constexpr int kDone = 0;
constexpr int kFailed = 1;
constexpr int kWrongUsage = 2;

std::string OverviewText(const std::vector<Command>& commands) {
  std::string text =
      "usage: ballast COMMAND [arguments] [flags]\n\n"
      "Shows and changes the jobs of a Ballast service.\n\ncommands:\n";
  for (const Command& command : commands) {
    std::string left = command.spec.name;
    for (const std::string& positional : command.spec.positionals) {
      absl::StrAppend(&left, " ", positional);
    }
    absl::StrAppendFormat(&text, "  %-24s %s\n", left, command.spec.summary);
  }
  absl::StrAppend(
      &text,
      "  help [COMMAND]           this text, or a command's flags\n\n"
      "Every command takes --json. Commands that call a service take --service ADDRESS (host:port, "
      "\nunix:/path, or etcd://host:port/prefix of a cluster; default: BALLAST_SERVICE, "
      "127.0.0.1:7070, or the socket of the packaged "
      "service),\n--timeout SECONDS and --wait SECONDS, and, if the service requires them, "
      "--tls-ca, --tls-cert,\n--tls-key and --token-file. `ballast --version` prints the build.\n");
  return text;
}

void AddCommonFlags(Command& command) {
  command.spec.flags.push_back({"json", "", "print JSON instead of a table"});
  command.spec.flags.push_back({"help", "", "print this text"});
  if (!command.asks_service) return;
  command.spec.flags.push_back({"service", "ADDRESS",
                                "host:port, unix:/path, or etcd://host:port/prefix of a cluster "
                                "(default: BALLAST_SERVICE, 127.0.0.1:7070, or the socket of the "
                                "packaged service)"});
  command.spec.flags.push_back(
      {"tls-ca", "FILE", "the authority of a TLS service's certificate (or BALLAST_TLS_CA)"});
  command.spec.flags.push_back({"tls-cert", "FILE", "a certificate (or BALLAST_TLS_CERT)"});
  command.spec.flags.push_back({"tls-key", "FILE", "its key (or BALLAST_TLS_KEY)"});
  command.spec.flags.push_back(
      {"token-file", "FILE", "a token, for TLS and unix sockets (or BALLAST_TOKEN_FILE)"});
  command.spec.flags.push_back(
      {"timeout", "SECONDS",
       absl::StrCat("longest wait for an answer (default ", command.timeout_seconds, ")")});
  command.spec.flags.push_back({"wait", "SECONDS",
                                "longest wait for an unreachable service, for example while its "
                                "process restarts (default 0); only read-only commands wait"});
}

// An error is one line, whatever a service's message has.
int Fail(int code, const absl::Status& status, const std::string& help, std::string& error) {
  error = absl::StrCat("ballast: ", Printable(absl::StrReplaceAll(status.message(), {{"\n", " "}})),
                       Printable(help), "\n");
  return code;
}

int RunCommand(const Command& command, const Arguments& arguments, std::string& output,
               std::string& error) {
  const std::string see = absl::StrCat("; see ballast help ", command.spec.name);
  const absl::StatusOr<std::optional<double>> timeout = arguments.Number("timeout");
  if (!timeout.ok()) return Fail(kWrongUsage, timeout.status(), see, error);
  const double seconds = timeout->value_or(command.timeout_seconds);
  // Written so that NaN is refused, here and below.
  if (!(seconds > 0)) {
    return Fail(kWrongUsage, absl::InvalidArgumentError("--timeout must be positive"), see, error);
  }
  const absl::StatusOr<std::optional<double>> wait = arguments.Number("wait");
  if (!wait.ok()) return Fail(kWrongUsage, wait.status(), see, error);
  if (!(wait->value_or(0) >= 0)) {
    return Fail(kWrongUsage, absl::InvalidArgumentError("--wait must not be negative"), see, error);
  }
  // Wrong usage is found before the service is called.
  absl::StatusOr<Action> action = command.prepare(arguments);
  if (!action.ok()) return Fail(kWrongUsage, action.status(), see, error);
  // One that asks no service looks for none.
  const std::string named = arguments.Has("service") ? arguments.Get("service", "")
                            : command.asks_service   ? DefaultService()
                                                     : "127.0.0.1:7070";
  Credentials credentials;
  if (command.asks_service) {
    credentials = OrEnvironment({.tls_ca = arguments.Get("tls-ca", ""),
                                 .tls_cert = arguments.Get("tls-cert", ""),
                                 .tls_key = arguments.Get("tls-key", ""),
                                 .token_file = arguments.Get("token-file", "")});
  }
  // This reads certificates and tokens, so what is wrong with them is found before the call, too.
  const absl::StatusOr<std::unique_ptr<Service>> service =
      Service::To(named, credentials, absl::Seconds(seconds), absl::Seconds(wait->value_or(0)));
  if (!service.ok()) return Fail(kWrongUsage, service.status(), "", error);
  absl::StatusOr<Answer> answer = (*action)(**service, arguments.Has("json"));
  if (!answer.ok()) return Fail(kFailed, answer.status(), "", error);
  // JSON is ASCII with its control characters escaped (Dump). Text gets that here, once for all
  // commands.
  output =
      arguments.Has("json") ? std::move(answer->text) : Printable(answer->text, Newlines::kKeep);
  return answer->good ? kDone : kFailed;
}

}  // namespace

std::vector<Command> AllCommands() {
  std::vector<Command> commands = {
      JobsCommand(),        JobCommand(),      HistoryCommand(),
      GroupsCommand(),      StateCommand(),    WriteStateCommand(),
      TraceCommand(),       SetGroupCommand(), SaveCommand(),
      LoadCommand(),        ImportCommand(),   ExportCommand(),
      CheckpointsCommand(), VerifyCommand(),   DeleteCheckpointCommand(),
      AbortStepCommand(),   UndoCommand(),     CloseCommand(),
      RestoreCommand(),     PlanCommand(),     DoctorCommand(),
      CompletionCommand()};
  for (Command& command : commands) AddCommonFlags(command);
  return commands;
}

int Run(const std::vector<std::string>& words, std::string& output, std::string& error) {
  const std::vector<Command> commands = AllCommands();
  if (words.empty()) {
    return Fail(kWrongUsage, absl::InvalidArgumentError("no command given; see ballast help"), "",
                error);
  }
  if (words[0] == "--version") {
    output = absl::StrCat("ballast ", VersionAndBuild(), "\n");
    return kDone;
  }
  const bool help = words[0] == "help" || words[0] == "--help" || words[0] == "-h";
  if (help && words.size() == 1) {
    output = OverviewText(commands);
    return kDone;
  }
  const std::string& name = help ? words[1] : words[0];
  const auto command = std::find_if(commands.begin(), commands.end(),
                                    [&](const Command& known) { return known.spec.name == name; });
  if (command == commands.end()) {
    std::vector<std::string> names;
    for (const Command& known : commands) names.push_back(known.spec.name);
    const std::string why = absl::StrCat("no command '", name, "'", Suggestion(name, names));
    return Fail(kWrongUsage, absl::InvalidArgumentError(why), "; see ballast help", error);
  }
  Arguments arguments;
  const absl::StatusOr<std::string> answer = arguments.Parse(
      command->spec, help ? std::vector<std::string>{"--help"}
                          : std::vector<std::string>(words.begin() + 1, words.end()));
  if (!answer.ok()) return Fail(kWrongUsage, answer.status(), "", error);
  if (answer->empty()) return RunCommand(*command, arguments, output, error);
  output = *answer;
  return kDone;
}

}  // namespace ballast::client::cli
