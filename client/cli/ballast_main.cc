// The `ballast` command line tool.
#include <grpc/support/log.h>

#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "client/cli/cli_command.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"

namespace {

// Ends the process as the signal does by default, but leaves no unfinished file.
void EndBySignal(int signal) {
  ballast::RemoveUnfinishedFile();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

}  // namespace

int main(int argc, char** argv) {
  // A closed pipe and a file that is too large make the write fail; they do not end the process.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGINT, EndBySignal);
  std::signal(SIGTERM, EndBySignal);
  gpr_set_log_function([](gpr_log_func_args*) {});  // Errors are said once, by this program.
  std::string output;
  std::string error;
  const int code =
      ballast::client::cli::Run(std::vector<std::string>(argv + 1, argv + argc), output, error);
  std::fputs(error.c_str(), stderr);
  if (std::fputs(output.c_str(), stdout) < 0 || std::fflush(stdout) != 0) {
    std::perror("ballast: cannot write to standard output");
    return 1;
  }
  return code;
}
