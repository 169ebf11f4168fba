// Plain values as bytes, and back, for the next process of the service, and for services of the same
// format. Not for files.
//
// A function beside a struct lists its fields, once for both directions:
//
//   template <typename Each> void Fields(Each&& each, Decision& v) { each(v.apply, v.norm); }
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_HOST_KEPT_CODEC_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_HOST_KEPT_CODEC_H_

#include <array>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/string_view.h"

namespace ballast {

template <typename T>
concept PlainValue = std::is_arithmetic_v<T> || std::is_enum_v<T>;

class KeptWriter {
 public:
  template <typename... T>
  void operator()(const T&... values) {
    (Write(values), ...);
  }
  const std::string& bytes() const { return bytes_; }

 private:
  template <PlainValue T>
  void Write(const T& value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void Write(const std::string& text) {
    Write(uint64_t{text.size()});
    bytes_.append(text);
  }
  template <PlainValue T>
  void Write(const std::vector<T>& values) {
    Write(uint64_t{values.size()});
    bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }
  template <typename T>
  void WriteAll(const T& values) {
    Write(uint64_t{values.size()});
    for (const auto& value : values) Write(value);
  }
  template <typename T>
  requires(!PlainValue<T>) void Write(const std::vector<T>& values) { WriteAll(values); }
  // Bit by bit.
  void Write(const std::vector<bool>& values) {
    Write(uint64_t{values.size()});
    for (size_t i = 0; i < values.size(); i += 8) {
      uint8_t byte = 0;
      for (size_t bit = 0; bit < 8 && i + bit < values.size(); ++bit) {
        byte |= static_cast<uint8_t>(values[i + bit] << bit);
      }
      Write(byte);
    }
  }
  template <typename... T>
  void Write(const std::variant<T...>& value) {
    Write(static_cast<uint8_t>(value.index()));
    std::visit([this](const auto& held) { this->Write(held); }, value);
  }
  template <typename T, size_t n>
  void Write(const std::array<T, n>& values) {
    for (const T& value : values) Write(value);
  }
  template <typename T>
  void Write(const std::deque<T>& values) {
    WriteAll(values);
  }
  template <typename K, typename V>
  void Write(const std::map<K, V>& values) {
    WriteAll(values);
  }
  template <typename A, typename B>
  void Write(const std::pair<A, B>& pair) {
    (*this)(pair.first, pair.second);
  }
  template <typename T>
  void Write(const std::optional<T>& value) {
    Write(value.has_value());
    if (value.has_value()) Write(*value);
  }
  template <typename T>
  requires std::is_class_v<T>
  void Write(const T& value) {
    Fields(*this, const_cast<T&>(value));  // Which only reads them.
  }

  std::string bytes_;
};

// Too few or too many bytes make it !ok(); then values are undefined.
class KeptReader {
 public:
  explicit KeptReader(absl::string_view bytes) : left_(bytes) {}

  template <typename... T>
  void operator()(T&... values) {
    (Read(values), ...);
  }
  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && left_.empty(); }

 private:
  bool Take(void* to, size_t bytes) {
    if (!ok_ || bytes > left_.size()) return ok_ = false;
    if (bytes > 0) std::memcpy(to, left_.data(), bytes);
    left_.remove_prefix(bytes);
    return true;
  }
  // The number of values to read, each of at least a byte.
  size_t ReadCount() {
    uint64_t count = 0;
    Read(count);
    if (count > left_.size()) ok_ = false;
    return ok_ ? static_cast<size_t>(count) : 0;
  }
  template <PlainValue T>
  void Read(T& value) {
    Take(&value, sizeof(value));
  }
  void Read(bool& value) {
    uint8_t byte = 0;
    Read(byte);
    if (byte > 1) ok_ = false;
    value = byte == 1;
  }
  void Read(std::vector<bool>& values) {
    uint64_t count = 0;
    Read(count);
    if (count / 8 > left_.size()) ok_ = false;
    values.assign(ok_ ? count : 0, false);
    for (size_t i = 0; i < values.size() && ok_; i += 8) {
      uint8_t byte = 0;
      Read(byte);
      for (size_t bit = 0; bit < 8 && i + bit < values.size(); ++bit) {
        values[i + bit] = (byte >> bit & 1) != 0;
      }
    }
  }
  template <typename... T>
  void Read(std::variant<T...>& value) {
    uint8_t index = 0;
    Read(index);
    if (!ok_ || index >= sizeof...(T)) {
      ok_ = false;
      return;
    }
    ReadAlternative(value, index, std::index_sequence_for<T...>());
  }
  template <typename... T, size_t... i>
  void ReadAlternative(std::variant<T...>& value, size_t index, std::index_sequence<i...>) {
    ((index == i ? ReadInto<i>(value) : void()), ...);
  }
  template <size_t i, typename... T>
  void ReadInto(std::variant<T...>& value) {
    std::variant_alternative_t<i, std::variant<T...>> held = {};
    Read(held);
    value.template emplace<i>(std::move(held));
  }
  void Read(std::string& text) {
    text.resize(ReadCount());
    Take(text.data(), text.size());
  }
  template <PlainValue T>
  void Read(std::vector<T>& values) {
    const size_t count = ReadCount();
    if (count > left_.size() / sizeof(T)) ok_ = false;
    values.resize(ok_ ? count : 0);
    Take(values.data(), values.size() * sizeof(T));
  }
  template <typename T>
  void ReadAll(T& values) {
    values.clear();
    for (size_t count = ReadCount(); count > 0 && ok_; --count) {
      values.emplace_back();
      Read(values.back());
    }
  }
  template <typename T>
  requires(!PlainValue<T>) void Read(std::vector<T>& values) { ReadAll(values); }
  template <typename T, size_t n>
  void Read(std::array<T, n>& values) {
    for (T& value : values) Read(value);
  }
  template <typename T>
  void Read(std::deque<T>& values) {
    ReadAll(values);
  }
  template <typename K, typename V>
  void Read(std::map<K, V>& values) {
    values.clear();
    for (size_t count = ReadCount(); count > 0 && ok_; --count) {
      std::pair<K, V> pair;
      (*this)(pair.first, pair.second);
      values.insert(std::move(pair));
    }
  }
  template <typename T>
  void Read(std::optional<T>& value) {
    bool has_value = false;
    Read(has_value);
    value.reset();
    if (!has_value || !ok_) return;
    T read = {};
    Read(read);
    value = std::move(read);
  }
  template <typename T>
  requires std::is_class_v<T>
  void Read(T& value) { Fields(*this, value); }

  absl::string_view left_;
  bool ok_ = true;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_KEPT_CODEC_H_
