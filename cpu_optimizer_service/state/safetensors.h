// The safetensors format: eight bytes of header length (little-endian), a JSON header that maps
// each tensor's name to dtype, shape and byte offsets, then the tensors' bytes without gaps.
// Source: https://github.com/huggingface/safetensors, "Format".
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

enum class TensorType : uint8_t { kF32, kBF16, kF16, kI16, kI8, kU8 };
int64_t SizeBytes(TensorType type);  // Of an element.

struct TensorEntry {
  std::string name;
  std::vector<int64_t> shape;
  int64_t elements = 0;
  TensorType type = TensorType::kF32;
};

struct WrittenFile {
  int64_t size_bytes = 0;
  std::string crc32;  // Of all its bytes: 8 hexadecimal digits in lower case.
};

struct SafetensorsStyle {
  DType dtype = DType::kFloat32;
  std::map<std::string, std::string> metadata;  // The header's, for other programs.
};

// Writes the tensors in order; larger elements come first, so that all are aligned. `read(tensor,
// offset, out)` fills tensor number `tensor` from element `offset` on. Its errors are returned.
absl::StatusOr<WrittenFile> WriteTensors(
    FileSystem& file_system, const std::string& path, absl::Span<const TensorEntry> tensors,
    absl::FunctionRef<absl::Status(int tensor, int64_t offset, absl::Span<std::byte> out)> read,
    const std::map<std::string, std::string>& metadata = {});
// The same of values, all in one dtype. FAILED_PRECONDITION: a finite element overflows the dtype.
absl::StatusOr<WrittenFile> WriteSafetensors(
    FileSystem& file_system, const std::string& path, absl::Span<const TensorEntry> tensors,
    absl::FunctionRef<void(int tensor, int64_t offset, absl::Span<float> out)> read,
    const SafetensorsStyle& style = {});

class SafetensorsFile {
 public:
  enum class Take : uint8_t {
    kState,    // Anything but F32, BF16, I16, I8 and U8, aligned, is damage.
    kWeights,  // Tensors in F32, BF16 and F16, read as floats; others are ignored.
  };
  // DATA_LOSS if the header or any offset does not fit the file, or the header has more than
  // `most_header_bytes`.
  static absl::StatusOr<SafetensorsFile> Open(FileSystem& file_system, const std::string& path,
                                              int64_t most_header_bytes, Take take = Take::kState);
  // The same for an open file; `path` is for errors.
  static absl::StatusOr<SafetensorsFile> Open(std::unique_ptr<ReadableFile> file,
                                              const std::string& path, int64_t most_header_bytes,
                                              Take take = Take::kState);

  // nullptr: no such tensor.
  const TensorEntry* Find(const std::string& name) const;
  // Of floats of any width.
  absl::Status Read(const std::string& name, int64_t offset, absl::Span<float> out) const;
  // As they are stored.
  absl::Status ReadBytes(const std::string& name, int64_t offset, absl::Span<std::byte> out) const;

  struct Element {
    std::string tensor;
    int64_t element = 0;
    float value = 0;
  };
  struct Contents {
    std::string crc32;  // As WrittenFile has it.
    // The first element of an F32 tensor that is not finite, or negative if that is invalid.
    std::optional<Element> bad;
  };
  // Reads the whole file, once. For a file opened with kState.
  absl::StatusOr<Contents> Examine(bool negative_is_bad) const;

 private:
  struct Place {
    TensorEntry entry;
    int64_t begin = 0;  // Byte of the file.
  };
  std::vector<const Place*> InOrder() const;
  std::unique_ptr<ReadableFile> file_;
  int64_t data_begin_ = 0;  // Byte of the file.
  std::map<std::string, Place> tensors_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_SAFETENSORS_H_
