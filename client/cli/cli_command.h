// A subcommand of `ballast`: its arguments and its action.
#ifndef BALLAST_CLIENT_CLI_CLI_COMMAND_H_
#define BALLAST_CLIENT_CLI_CLI_COMMAND_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/cli_arguments.h"

namespace ballast::client {
class Service;
}

namespace ballast::client::cli {

// What an action prints on standard output.
struct Answer {
  Answer(std::string text, bool good = true) : text(std::move(text)), good(good) {}
  std::string text;
  bool good;  // False: the exit code is 1, for example if a plan does not fit.
};

// Does the work.
using Action = std::function<absl::StatusOr<Answer>(Service& service, bool json)>;

// How abort-step, undo and load affect trainers, for their help and their output.
inline constexpr char kGenerationRises[] =
    "The job's generation rises: the streams of all workers end with ABORTED. Restart "
    "ballast-worker\non every rank; your own trainer opens its sessions again.";
inline constexpr char kRanksMustReturn[] =
    "the workers' streams ended with ABORTED: start ballast-worker again on every rank (or reopen "
    "the sessions of your own trainer)\n";

struct Command {
  CommandSpec spec;
  // How long one call to the service may take, in seconds, unless --timeout says otherwise.
  double timeout_seconds = 10;
  // False: it has no flags about a service, and must not use it.
  bool asks_service = true;
  // Errors mean wrong usage. The service has not been called yet.
  absl::StatusOr<Action> (*prepare)(const Arguments& arguments);
};

Command JobsCommand();
Command JobCommand();
Command AbortStepCommand();
Command UndoCommand();
Command CloseCommand();
Command GroupsCommand();
Command SetGroupCommand();
Command StateCommand();
Command WriteStateCommand();
Command HistoryCommand();
Command TraceCommand();
Command SaveCommand();
Command LoadCommand();
Command ImportCommand();
Command ExportCommand();
Command CheckpointsCommand();
Command VerifyCommand();
Command DeleteCheckpointCommand();
Command RestoreCommand();
Command PlanCommand();
Command DoctorCommand();
Command CompletionCommand();

// All commands, in the order of the help.
std::vector<Command> AllCommands();

// Runs `ballast` with these words (without the program's name). Returns 0 if it is done, 1 if it
// failed, 2 for wrong usage. An error is one line in `error`.
int Run(const std::vector<std::string>& words, std::string& output, std::string& error);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_CLI_COMMAND_H_
