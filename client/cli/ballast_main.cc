// The `ballast` command line tool.
#include <grpc/support/log.h>

#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "client/cli/cli_command.h"
#include "client/cli/cli_export.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"
#include "cpu_optimizer_service/state/weights_export.h"
#include "proto/convert.h"

namespace {

// Ends the process as the signal does by default, but leaves no unfinished file.
void EndBySignal(int signal) {
  ballast::RemoveUnfinishedFile();
  // The signal is raised again, so that whoever waits for the process sees which one has ended it.
  // It is blocked in its own handler, and comes when this function returns.
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

absl::StatusOr<ballast::v1::ExportedWeights> Export(
    const ballast::client::cli::ExportOrder& order) {
  BALLAST_ASSIGN_OR_RETURN(const ballast::ExportedWeights exported,
                           ballast::ExportWeights(ballast::PosixFileSystem(),
                                                  {.checkpoint = order.checkpoint,
                                                   .directory = order.directory,
                                                   .dtype = order.dtype,
                                                   .most_file_bytes = order.most_file_bytes}));
  ballast::v1::ExportedWeights message;
  message.set_job(exported.job);
  message.set_checkpoint(exported.checkpoint);
  message.mutable_passed_over()->Assign(exported.passed_over.begin(), exported.passed_over.end());
  message.set_step(exported.step);
  message.set_directory(order.directory);
  message.set_dtype(ballast::proto::ToProto(order.dtype));
  message.set_tensors(exported.tensors);
  message.set_bytes(exported.bytes);
  message.mutable_files()->Assign(exported.files.begin(), exported.files.end());
  return message;
}

}  // namespace

int main(int argc, char** argv) {
  // A closed pipe and a file that is too large make the write fail; they do not end the process.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGINT, EndBySignal);
  std::signal(SIGTERM, EndBySignal);
  gpr_set_log_function([](gpr_log_func_args*) {});  // Errors are said once, by this program.
  ballast::client::cli::SetExporter(Export);
  std::string output;
  std::string error;
  const int code =
      ballast::client::cli::Run(std::vector<std::string>(argv + 1, argv + argc), output, error);
  std::fputs(error.c_str(), stderr);
  // A full disk may show only when the buffer is written.
  if (std::fputs(output.c_str(), stdout) < 0 || std::fflush(stdout) != 0) {
    std::perror("ballast: cannot write to standard output");
    return 1;
  }
  return code;
}
