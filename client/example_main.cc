// A complete program with one rank: fits w to 1 with Adam on a Ballast service.
//
//   ballastd &
//   ballast-example 127.0.0.1:7070
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ballast/client/connect.h"
#include "ballast/client/session.h"

namespace client = ballast::client;

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "ballast-example: %s\n", status.ToString().c_str());
  std::exit(1);
}

int main(int argc, char** argv) {
  constexpr int kElements = 512;
  ballast::JobSpec job;
  job.name = "example";
  job.groups = {{.name = "all",
                 .hyper_parameters = {.lr = 0.05, .weight_decay = 0},
                 .wire_dtype = ballast::DType::kFloat32,
                 .return_dtype = ballast::DType::kFloat32}};
  job.layout.parameters = {{.name = "w", .shape = {kElements}}};
  job.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = kElements}};

  std::vector<float> w(kElements), gradient(kElements);
  const auto bytes = [](std::vector<float>& v) {
    return absl::Span<std::byte>(reinterpret_cast<std::byte*>(v.data()), v.size() * sizeof(float));
  };
  auto channel = client::Connect(argc > 1 ? argv[1] : "127.0.0.1:7070");
  Check(channel.status());
  // All of w is one chunk, number 0. Its weights are written to w itself.
  auto opened = client::Session::Open(
      *channel, {.job = job, .rank = 0, .weights = [&](int chunk) { return bytes(w); }});
  Check(opened.status());
  client::Session& session = **opened;
  if (session.awaiting_weights())
    Check(session.UploadWeights([](int chunk, auto out) {}));  // Zeros.
  Check(session.ReadWeights());

  for (int step = 0; step < 200; ++step) {
    for (int i = 0; i < kElements; ++i) gradient[i] = w[i] - 1.0f;  // d/dw (w - 1)^2 / 2.
    Check(session.BeginStep({}));
    Check(session.Push({.chunk = 0, .payload = bytes(gradient)}));
    Check(session.EndMicroStep(0, {}));
    Check(session.Seal(/*micro_steps=*/1, {}).status());  // Waits for all ranks.
    Check(session.ReceiveWeights());                      // Now w has the step's weights.
  }
  std::printf("step %llu: w[0] = %.4f, w[511] = %.4f\n",
              static_cast<unsigned long long>(session.committed_step()), w[0], w[511]);
}
