// The safetensors format: eight bytes of header length (little-endian), a JSON header that maps
// each tensor's name to dtype, shape and byte offsets, then the tensors' bytes without gaps.
// Source: https://github.com/huggingface/safetensors, "Format". All tensors that are written to a
// file have one dtype.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SAFETENSORS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/host/file_system.h"

namespace ballast {

// Hugging Face's name for a model's weights in one file.
inline constexpr char kModelFile[] = "model.safetensors";

struct TensorEntry {
  std::string name;
  std::vector<int64_t> shape;
  int64_t elements = 0;
};

struct WrittenFile {
  int64_t size_bytes = 0;
  std::string crc32;  // Of all its bytes: 8 hexadecimal digits in lower case.
};

struct SafetensorsStyle {
  DType dtype = DType::kFloat32;
  std::map<std::string, std::string> metadata;  // The header's, for other programs.
};

// Writes the tensors in order. `read(tensor, offset, out)` fills elements [offset, offset +
// out.size()) of tensor number `tensor`. FAILED_PRECONDITION: a finite element overflows the dtype.
absl::StatusOr<WrittenFile> WriteSafetensors(
    FileSystem& file_system, const std::string& path, absl::Span<const TensorEntry> tensors,
    absl::FunctionRef<void(int tensor, int64_t offset, absl::Span<float> out)> read,
    const SafetensorsStyle& style = {});

class SafetensorsFile {
 public:
  enum class Take : uint8_t {
    kF32,      // Anything else is damage.
    kWeights,  // Tensors in F32, BF16 and F16, read as floats; others are ignored.
  };
  // DATA_LOSS if the header or any offset does not fit the file, or the header has more than
  // `most_header_bytes`.
  static absl::StatusOr<SafetensorsFile> Open(FileSystem& file_system, const std::string& path,
                                              int64_t most_header_bytes, Take take = Take::kF32);
  // The same for an open file; `path` is for errors.
  static absl::StatusOr<SafetensorsFile> Open(std::unique_ptr<ReadableFile> file,
                                              const std::string& path, int64_t most_header_bytes,
                                              Take take = Take::kF32);

  // nullptr: no such tensor.
  const TensorEntry* Find(const std::string& name) const;
  absl::Status Read(const std::string& name, int64_t offset, absl::Span<float> out) const;

  struct Element {
    std::string tensor;
    int64_t element = 0;
    float value = 0;
  };
  struct Contents {
    std::string crc32;  // As WrittenFile has it.
    // The first element of a tensor that is not finite, or negative if that is invalid.
    std::optional<Element> bad;
  };
  // Reads the whole file, once. For a file opened with kF32.
  absl::StatusOr<Contents> Examine(bool negative_is_bad) const;

 private:
  struct Place {
    TensorEntry entry;
    int64_t begin = 0;  // Byte of the file.
    DType dtype = DType::kFloat32;
  };
  std::vector<const Place*> InOrder() const;
  std::unique_ptr<ReadableFile> file_;
  int64_t data_begin_ = 0;  // Byte of the file.
  std::map<std::string, Place> tensors_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SAFETENSORS_H_
