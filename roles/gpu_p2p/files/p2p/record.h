// One flat JSON object, written field by field.
#pragma once
#include <cmath>
#include <cstdio>
#include <string>

class Record {
  public:
    Record &text(const char *key, const std::string &value) {
        std::string quoted = "\"";
        for (const char c : value) {
            if (c == '"' || c == '\\') quoted += '\\';
            quoted += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
        }
        return raw(key, quoted + "\"");
    }
    Record &number(const char *key, double value) {
        char digits[32];
        std::snprintf(digits, sizeof digits, "%.6g", value);
        return raw(key, std::isfinite(value) ? digits : "null");
    }
    Record &integer(const char *key, long long value) { return raw(key, std::to_string(value)); }
    Record &truth(const char *key, bool value) { return raw(key, value ? "true" : "false"); }
    Record &raw(const char *key, const std::string &json) {
        fields_ += (fields_.empty() ? "\"" : ", \"") + std::string(key) + "\": " + json;
        return *this;
    }
    std::string json() const { return "{" + fields_ + "}"; }

  private:
    std::string fields_;
};
