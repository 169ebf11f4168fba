// A subcommand of `ballast`: what it takes, and how its arguments become something to do.
#ifndef BALLAST_CLIENT_CLI_CLI_COMMAND_H_
#define BALLAST_CLIENT_CLI_CLI_COMMAND_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/cli_arguments.h"

namespace ballast::client::cli {

class Service;

// Does it and returns what to print.
using Action = std::function<absl::StatusOr<std::string>(Service& service, bool json)>;

// What abort-step and load do to the trainers, for their help and for what they print.
inline constexpr char kGenerationRises[] =
    "The job's generation rises: the streams of all workers end with ABORTED. Start "
    "ballast-worker\n"
    "again on every rank; a trainer of your own opens its sessions again.";
inline constexpr char kRanksMustReturn[] =
    "the workers' streams ended with ABORTED: start ballast-worker again on every rank (or reopen "
    "the sessions of your own trainer)\n";

struct Command {
  CommandSpec spec;
  // How long one call to the service may take, in seconds, unless --timeout says otherwise.
  double timeout_seconds = 10;
  // Errors are wrong usage; nothing has been asked of the service yet.
  absl::StatusOr<Action> (*prepare)(const Arguments& arguments);
};

Command JobsCommand();
Command JobCommand();
Command AbortStepCommand();
Command CloseCommand();
Command GroupsCommand();
Command SetGroupCommand();
Command StateCommand();
Command TraceCommand();
Command SaveCommand();
Command LoadCommand();

// All of them, in the order of the help.
std::vector<Command> AllCommands();

// Runs `ballast` with these words (without the program's name): 0 done, 1 failed, 2 wrong usage.
// Errors are one line in `error`.
int Run(const std::vector<std::string>& words, std::string& output, std::string& error);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_CLI_COMMAND_H_
