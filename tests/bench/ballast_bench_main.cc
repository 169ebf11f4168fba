// ballast-bench worker: a load on a service, from ranks that need no GPU.
#include <cstdio>

#include "absl/strings/string_view.h"
#include "tests/bench/load/load_options.h"
#include "tests/bench/load/load_report.h"
#include "tests/bench/load/load_run.h"

namespace bench = ballast::bench;

namespace {

int Fail(const absl::Status& status, int code) {
  std::fprintf(stderr, "ballast-bench: %s\n", std::string(status.message()).c_str());
  return code;
}

int RunWorker(absl::Span<char* const> arguments) {
  const auto options = bench::ParseLoadOptions(arguments);
  if (!options.ok()) return Fail(options.status(), 2);
  const auto result = bench::RunLoad(*options);
  if (!result.ok()) return Fail(result.status(), 1);
  const bench::Figures figures = bench::FiguresOf(*options, *result);
  std::fputs(bench::TextOf(figures).c_str(), stdout);
  if (options->json_path.empty()) return 0;
  const absl::Status written = figures.Write(options->json_path);
  return written.ok() ? 0 : Fail(written, 1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || absl::string_view(argv[1]) != "worker") {
    return Fail(absl::InvalidArgumentError("expected 'ballast-bench worker [flags]'"), 2);
  }
  return RunWorker(absl::MakeSpan(argv + 2, static_cast<size_t>(argc - 2)));
}
