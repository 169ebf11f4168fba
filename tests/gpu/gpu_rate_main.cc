// ballast-gpu-rate: what the GPU of this machine is and can do, as one line of JSON. The rate of
// matrix products is that of the library that the trainer uses, on random bf16 values, in
// 8192-cubed products: what a share of the GPU's speed is measured against.
//
// Exits with 77 and a message where there is no GPU or none that this program is made for; with 1
// if there is one that cannot be used.
#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/base/random.h"
#include "gpu_worker/cuda/cublaslt_matmul.h"
#include "gpu_worker/cuda/cuda_device.h"

namespace ballast::worker {
namespace {

constexpr int kNoGpu = 77;
constexpr int64_t kSize = 8192;
constexpr int kWarmUps = 5;
constexpr int kProducts = 20;

absl::Status FillRandomly(DeviceStream& stream, DeviceMemory& memory, uint64_t seed) {
  std::vector<BFloat16Bits> row(1 << 20);
  for (size_t i = 0; i < row.size(); ++i) row[i] = FloatToBFloat16(RandomNormal(seed, 0, i));
  const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(row.data()),
                                          row.size() * sizeof(row[0]));
  for (size_t at = 0; at < memory.size_bytes(); at += bytes.size()) {
    BALLAST_RETURN_IF_ERROR(stream.CopyToDevice(memory.data() + at, bytes));
  }
  return stream.Synchronize();
}

// Multiplications and additions a second.
absl::StatusOr<double> MeasureRate(CudaDevice& device) {
  BALLAST_ASSIGN_OR_RETURN(const auto matmul, MakeCublasLtMatmul(device));
  BALLAST_ASSIGN_OR_RETURN(const auto stream, device.CreateStream("compute"));
  std::vector<std::unique_ptr<DeviceMemory>> matrices;
  for (const char* what : {"a", "b", "product"}) {
    BALLAST_ASSIGN_OR_RETURN(matrices.emplace_back(),
                             device.Allocate(kSize * kSize * sizeof(BFloat16Bits), what));
    BALLAST_RETURN_IF_ERROR(FillRandomly(*stream, *matrices.back(), matrices.size()));
  }
  BALLAST_ASSIGN_OR_RETURN(const auto begin, device.CreateEvent());
  BALLAST_ASSIGN_OR_RETURN(const auto end, device.CreateEvent());
  for (int i = 0; i < kWarmUps + kProducts; ++i) {
    if (i == kWarmUps) BALLAST_RETURN_IF_ERROR(stream->Record(*begin));
    BALLAST_RETURN_IF_ERROR(matmul->Run(*stream, {.m = kSize,
                                                  .n = kSize,
                                                  .k = kSize,
                                                  .transpose_b = true,
                                                  .a = matrices[0]->as<BFloat16Bits>(),
                                                  .b = matrices[1]->as<BFloat16Bits>(),
                                                  .out = matrices[2]->data()}));
  }
  BALLAST_RETURN_IF_ERROR(stream->Record(*end));
  BALLAST_RETURN_IF_ERROR(end->Synchronize());
  BALLAST_ASSIGN_OR_RETURN(const double seconds, end->SecondsSince(*begin));
  return 2.0 * kSize * kSize * kSize * kProducts / seconds;
}

// As nvidia-smi names it.
std::string Uuid(const CudaDevice& device) {
  const std::array<std::byte, 16> uuid = device.uuid();
  const std::string digits =
      absl::BytesToHexString({reinterpret_cast<const char*>(uuid.data()), uuid.size()});
  const absl::string_view all = digits;
  return absl::StrCat("GPU-", all.substr(0, 8), "-", all.substr(8, 4), "-", all.substr(12, 4), "-",
                      all.substr(16, 4), "-", all.substr(20));
}

absl::Status PrintRate(CudaDevice& device) {
  BALLAST_ASSIGN_OR_RETURN(const double rate, MeasureRate(device));
  const nlohmann::ordered_json json = {{"gpu", device.name()},
                                       {"uuid", Uuid(device)},
                                       {"compute_capability", device.compute_capability()},
                                       {"memory_bytes", device.memory_bytes()},
                                       {"bf16_matrix_flops_per_second", rate}};
  std::printf("%s\n", json.dump().c_str());
  return absl::OkStatus();
}

}  // namespace
}  // namespace ballast::worker

int main() {
  const auto fail = [](const absl::Status& status, int exit_code) {
    std::fprintf(stderr, "ballast-gpu-rate: %s\n", std::string(status.message()).c_str());
    return exit_code;
  };
  const auto device = ballast::worker::CudaDevice::Open(0);
  if (absl::IsFailedPrecondition(device.status())) {
    return fail(device.status(), ballast::worker::kNoGpu);
  }
  if (!device.ok()) return fail(device.status(), 1);
  // From here on there is a GPU, and a failure, such as a missing cuBLASLt, is an error.
  const absl::Status status = ballast::worker::PrintRate(**device);
  return status.ok() ? 0 : fail(status, 1);
}
